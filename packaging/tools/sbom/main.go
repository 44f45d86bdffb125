// Command sbom writes the software bill of materials of Go programs, from the linker's records in
// the programs, as CycloneDX JSON:
//
//	sbom -version 1.2.3 -time 1763800000 -sums ../../go.sum PROGRAM... >sbom.json
//
// The same programs give the same text.
package main

import (
	"bufio"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

func main() {
	version := flag.String("version", "", "`VERSION` of the programs")
	seconds := flag.Int64("time", 0, "creation time of the document, in `SECONDS` since 1970")
	sums := flag.String("sums", "go.sum", "`FILE` with the sums of modules")
	flag.Parse()
	bom, err := describe(*version, time.Unix(*seconds, 0), *sums, flag.Args())
	if err == nil {
		err = cdx.NewBOMEncoder(os.Stdout, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

// describe returns the bill of materials of programs.
func describe(version string, made time.Time, sums string, programs []string) (*cdx.BOM, error) {
	hashes, err := readSums(sums)
	if err != nil {
		return nil, err
	}
	modules := map[string]cdx.Component{}
	var files []cdx.Component
	var edges []cdx.Dependency
	for _, path := range programs {
		file, needs, err := program(path, hashes, modules)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
		edges = append(edges, cdx.Dependency{Ref: file.BOMRef, Dependencies: &needs})
	}
	components := files
	for _, ref := range slices.Sorted(maps.Keys(modules)) {
		components = append(components, modules[ref])
	}
	root := cdx.Component{
		Type: cdx.ComponentTypeApplication, Name: "peerlane", Version: version, BOMRef: "peerlane",
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
	}
	var refs []string
	for _, f := range files {
		refs = append(refs, f.BOMRef)
	}
	edges = append([]cdx.Dependency{{Ref: root.BOMRef, Dependencies: &refs}}, edges...)
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Timestamp: made.UTC().Format(time.RFC3339), Component: &root}
	bom.Components, bom.Dependencies = &components, &edges
	return bom, nil
}

// program adds the modules of a program, and returns a component for the program with references to
// its modules. A C library has no modules.
func program(path string, hashes map[string]string, modules map[string]cdx.Component) (file cdx.Component,
	needs []string, err error) {
	sum, err := fileSum(path)
	if err != nil {
		return file, nil, err
	}
	name := filepath.Base(path)
	// The front of the command has the same name and a separate folder.
	if folder := filepath.Base(filepath.Dir(path)); folder == "front" {
		name = folder + "/" + name
	}
	file = cdx.Component{Type: cdx.ComponentTypeFile, Name: name, BOMRef: "file:" + name,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}}}
	if strings.Contains(name, ".so") {
		return file, []string{}, nil
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return file, nil, err
	}
	add := func(path, version string) {
		ref := "pkg:golang/" + path + "@" + version
		c := cdx.Component{Type: cdx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: ref, BOMRef: ref}
		if sum, known := hashes[path+" "+version]; known {
			c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}}
		}
		modules[ref] = c
		needs = append(needs, ref)
	}
	add("std", strings.TrimPrefix(info.GoVersion, "go"))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		add(m.Path, m.Version)
	}
	slices.Sort(needs)
	return file, needs, nil
}

// readSums reads the hashes of modules in a go.sum, in hexadecimal, by path and version.
func readSums(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sums := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) != 3 || strings.HasSuffix(fields[1], "/go.mod") {
			continue
		}
		raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(fields[2], "h1:"))
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", path, fields[0], err)
		}
		sums[fields[0]+" "+fields[1]] = hex.EncodeToString(raw)
	}
	return sums, lines.Err()
}

func fileSum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
