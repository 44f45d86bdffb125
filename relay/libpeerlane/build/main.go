// Command build compiles libpeerlane:
//
//	go run ./relay/libpeerlane/build bin                       the library and a link
//	go run ./relay/libpeerlane/build -install DIR -version V   with headers and pkg-config's file, as a package has them
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/peerlane/peerlane/relay/libpeerlane"
)

func main() {
	install := flag.String("install", "", "install into the usual places below `DIR`, instead")
	version := flag.String("version", "0", "of the release, for pkg-config")
	flag.Parse()
	var err error
	switch {
	case *install != "" && flag.NArg() == 0:
		places := libpeerlane.Installed()
		places.DestDir, places.Version = *install, *version
		err = libpeerlane.Install(places)
	case *install == "" && flag.NArg() == 1:
		err = libpeerlane.Build(flag.Arg(0))
	default:
		fmt.Fprintln(os.Stderr, "usage: build DIR, or build -install DIR [-version V]")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
