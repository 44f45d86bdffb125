// Package selftest tests pairs of GPUs, and GPUs with NICs, in processes of peerlane-relay, and
// stores the results of this boot.
package selftest
