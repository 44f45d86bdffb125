// Package ncclxml reads and writes the topology files of NCCL and RCCL: the XML of
// NCCL_TOPO_DUMP_FILE and NCCL_TOPO_FILE (NCCL 2.30, src/graph/xml.cc).
package ncclxml
