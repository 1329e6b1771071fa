"""Rules with the parameters, defaults and documented semantics of Amazon SageMaker Debugger.

They are for those who migrate: `watchstep_rules.rule_files.presets.sagemaker` lists all 33 with what differs. Their criteria are those of the
developer guide, for the code of Amazon's rules was never published.
"""
