"""A cluster on one machine: a real etcd and brokers as child processes, with all their data below one directory.

::

    <data_dir>/
      lock             held by the process that runs the cluster
      cluster.json     addresses and process ids, while it runs (`locate` reads it)
      etcd/            etcd's data
      brokers/<id>/    a broker's durable spools and its lease
      fragments/       the root of file:/// fragment stores
      logs/            the output of etcd and the brokers

No child outlives the process that runs the cluster, however that process ends. The next start continues with the data
in the directory.
"""

from coranto.cluster.client_config import resolve_client_config
from coranto.cluster.embedded import EmbeddedCluster
from coranto.cluster.etcd_server import EtcdServer
from coranto.cluster.foreground import run_foreground
from coranto.cluster.info import ClusterInfo, locate

__all__ = ["ClusterInfo", "EmbeddedCluster", "EtcdServer", "locate", "resolve_client_config", "run_foreground"]
