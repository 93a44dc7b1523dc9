"""Every write path, cut at its statements as often as is wanted, whether it comes often by itself or not."""
