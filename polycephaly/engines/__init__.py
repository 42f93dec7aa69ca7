"""Whatever runs drones: forks of this process, actors of Ray, pools of other processes."""
