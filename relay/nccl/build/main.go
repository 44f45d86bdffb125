// Command build compiles the NCCL plugin:
//
//	go run ./relay/nccl/build bin
//	go run ./relay/nccl/build bin 8    a plugin that shows version 8 of NCCL's interface alone
package main

import (
	"fmt"
	"os"
	"strconv"

	"github.com/peerlane/peerlane/relay/nccl"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: build DIR [VERSION...]")
		os.Exit(2)
	}
	if err := build(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func build(dir string, versions []string) error {
	if len(versions) == 0 {
		return nccl.Build(dir)
	}
	for _, text := range versions {
		version, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		if err := nccl.BuildVersion(dir, version); err != nil {
			return err
		}
	}
	return nil
}
