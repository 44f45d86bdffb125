// Command image writes the image of the DaemonSet from a root file system: an OCI layout in the
// directory image below DIR, and the same layout in the file image.tar.
//
//	image -name localhost/peerlane-kubelet:1.0 -time 1790000000 -out dist ROOTFS
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/peerlane/peerlane/internal/oci"
)

func main() {
	name := flag.String("name", "", "reference of the image")
	seconds := flag.Int64("time", 0, "time of all files, in seconds since 1970")
	out := flag.String("out", "dist", "directory of image and image.tar")
	flag.Parse()
	if *name == "" || flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: image -name REFERENCE [-time SECONDS] [-out DIR] ROOTFS")
		os.Exit(2)
	}
	if err := write(*name, flag.Arg(0), *out, time.Unix(*seconds, 0)); err != nil {
		fmt.Fprintln(os.Stderr, "writing the image:", err)
		os.Exit(1)
	}
}

func write(name, rootfs, out string, at time.Time) error {
	i := oci.Image{Name: name, Architecture: runtime.GOARCH, Time: at,
		Config: map[string]any{"Entrypoint": []string{"/usr/bin/peerlane-kubelet"}, "Env": []string{"PATH=/usr/bin"}}}
	layer, err := oci.Layer(rootfs, at)
	if err != nil {
		return err
	}
	layout := filepath.Join(out, "image")
	if err := os.RemoveAll(layout); err != nil {
		return err
	}
	if err := i.WriteLayout(layout, layer); err != nil {
		return err
	}
	archive, err := os.Create(layout + ".tar")
	if err != nil {
		return err
	}
	return errors.Join(i.WriteArchive(archive, layer), archive.Close())
}
