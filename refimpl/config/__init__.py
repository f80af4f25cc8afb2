"""What a vendor and a user say: configs, their dtypes, patterns, QConfigs, and fuser methods."""
