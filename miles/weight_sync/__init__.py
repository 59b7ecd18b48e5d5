"""Weight sync: publishing a trainer's weights and getting them, proven, into engines that keep generating."""
