// Package cpuset reads sets of processors in the notation of hwloc.
package cpuset
