// Package reader reads hosts: Sysfs reads a running host, HwlocXML and SMI read files of hwloc
// and the text of nvidia-smi topo -m, and Capture and ReadCapture write and read an archive of
// the files that Sysfs reads. Input selects the reader by the content of a file.
//
// All input is untrusted: each reader bounds the size, the depth and the numbers of its input,
// and refuses control characters.
package reader
