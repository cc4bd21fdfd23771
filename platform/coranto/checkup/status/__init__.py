"""The status of a whole cluster: unhealthy parts, lagging consumers, and changes since an earlier snapshot.

It lists all journals, and asks each broker for the journals that it leads. So its cost grows with the number of
brokers, stores and consumers, and a broker that does not answer delays it by at most the timeout.
"""
