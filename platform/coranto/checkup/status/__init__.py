"""Looks at a whole cluster: unhealthy parts, consumers that are behind, and changes since an earlier look.

A look lists all journals, and asks each broker for the journals that it leads. So its cost grows with the number of
brokers, stores and consumers, and a broker that does not answer delays it by the timeout alone.
"""
