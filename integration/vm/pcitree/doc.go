// Package pcitree gives the guest's kernel a PCIe tree of emulated GPUs, NICs and switches: tables
// of text become the records that the guest's module pcitree (integration/vm/module) makes root
// buses of.
//
// A table has one line per bridge or function; devices below a bridge are indented further:
//
//	host-bridge 0000:15 numa=0
//	    root-port 8086:352a gen5 x16 acs
//	        switch 1000:c030 gen5 x16 acs
//	            gpu 10de:2330 gen5 x16
//	            nic 15b3:1021 gen5 x16
//
// The lines are
//
//	host-bridge DDDD:BB                 a root complex: its domain and root bus
//	root-port   VENDOR:DEVICE genN xN   below a host bridge; one thing below it
//	switch      VENDOR:DEVICE genN xN   an upstream port, and one downstream port
//	                                    for each thing below it
//	gpu         VENDOR:DEVICE genN xN   class 030200, driver nvidia
//	nic         VENDOR:DEVICE genN xN   class 020700, driver mlx5_core
//	nvme        VENDOR:DEVICE genN xN   class 010802, no driver
//	function    CLASS VENDOR:DEVICE genN xN
//
// Numbers are hexadecimal, except those of genN, xN and numa. genN and xN are the maximum link
// speed and width. Optional words follow:
//
//	numa=N                of a host bridge; none without it
//	acs, acs=on           of a root port, and of a switch for its downstream
//	                      ports: Access Control Services, disabled or enabled
//	port-acs=none|off|on  of what is below a switch: its downstream port differs
//	link=genNxN           the link above works slower than its ends could
//	subsystem=VENDOR:DEVICE
//	class=CLASS
//	driver=NAME           nvidia, mlx5_core or none
//	uuid=GPU-...          of a GPU; without it, one that follows from the address
//
// A # starts a comment. Bus numbers are assigned depth first, as by a BIOS: root ports are devices
// 1, 2, … of the root bus.
package pcitree
