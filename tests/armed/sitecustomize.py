"""Run by each fresh interpreter that has this directory on its PYTHONPATH: of those that a test has
armed (`failpoints.armed`), and by what they start."""

import failpoints

failpoints.arm_from_environment()
