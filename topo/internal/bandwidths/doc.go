// Package bandwidths has the rates that NCCL and RCCL assume for links.
package bandwidths
