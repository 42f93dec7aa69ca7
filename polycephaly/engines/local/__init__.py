"""The local engine: drones on this machine, forked from a snapshot of the controller process."""
