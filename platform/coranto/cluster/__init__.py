"""A cluster on one machine: a real etcd and brokers as child processes, all that they keep below one directory.

::

    <data_dir>/
      lock             held by the process that runs the cluster
      cluster.json     where things are, while it runs (`locate` reads it)
      etcd/            etcd's data
      brokers/<id>/    a broker's durable spools and its lease
      fragments/       where file:/// fragment stores are rooted
      logs/            what etcd and the brokers print

Nothing outlives the process that runs the cluster, however that process ends; what is in the directory is taken up
again by the next start.
"""

from coranto.cluster.embedded import EmbeddedCluster
from coranto.cluster.etcd_server import EtcdServer
from coranto.cluster.foreground import run_foreground
from coranto.cluster.info import ClusterInfo, locate

__all__ = ["ClusterInfo", "EmbeddedCluster", "EtcdServer", "locate", "run_foreground"]
