// Package picture draws a host: its NUMA nodes, PCIe switches, GPUs and NICs as a
// tree from left to right, and beside it the lanes of a plan with what each is
// estimated to carry.
//
// [New] decides where everything goes, and is a pure function: the same host,
// plan and estimate give the same picture, to the byte. [Picture.SVG] and
// [Picture.HTML] write it as one file that loads nothing, follows the reader's
// choice of light or dark, and can be read without colours. What the topology
// does not tell is not drawn.
//
// Each row is a device, and has everything that is about it: the link upwards on
// its left, the ends of its lanes and its bandwidth on its right. So no two texts
// meet, however many devices there are: a picture grows downwards.
package picture
