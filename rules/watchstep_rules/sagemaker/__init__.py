"""Rules with the semantics of Amazon SageMaker Debugger, where no other rule's parameters express them.

They are for those who migrate: `watchstep_rules.presets` has them with Amazon's parameters. Their criteria are those of
the developer guide, for the code of Amazon's rules was never published.
"""
