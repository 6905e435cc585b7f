"""Windows over the episodes of robots: data sets in the layouts of LeRobot."""
