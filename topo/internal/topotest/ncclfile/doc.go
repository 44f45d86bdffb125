// Package ncclfile reads files of NCCL in tests, and checks them byte by byte as NCCL does.
package ncclfile
