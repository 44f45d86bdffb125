// Package picture draws a host: NUMA nodes, PCIe switches, GPUs and NICs as a tree from left to
// right, and beside the tree the lanes of a plan with estimated rates.
//
// [New] computes the layout, and is a pure function: equal hosts, plans and estimates give
// equal pictures, to the byte. [Picture.SVG] and [Picture.HTML] write the picture as a file
// that loads no other file, follows the reader's choice of light or dark, and is readable
// without colours. The picture omits values that the topology lacks.
//
// A row is a device: the link upwards is on the left, the ends of lanes and the bandwidth on
// the right. So no two texts meet, however many devices the host has: a picture grows
// downwards.
package picture
