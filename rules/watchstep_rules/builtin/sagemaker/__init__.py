"""Rules with the parameters, defaults and documented semantics of Amazon SageMaker Debugger.

They exist for users who migrate. `watchstep_rules.rule_files.presets` lists all 33 and their differences. The criteria follow the
developer guide, because the source code of Amazon's rules is not published.
"""
