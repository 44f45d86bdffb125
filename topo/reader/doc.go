// Package reader reads hosts: Sysfs reads a running host, SMI the text of nvidia-smi topo -m, and
// Input a file of hwloc, NCCL, nvidia-smi or Capture, which it recognises by the content. Capture
// writes an archive of the files that Sysfs reads.
//
// All input is untrusted: each reader bounds the size, the depth and the numbers of its input,
// and refuses control characters.
package reader
