"""A project of Flower with secure aggregation: the server learns the mean of all uploads, and no single one."""
