package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestFrontRunsTopoAndVersionAlone(t *testing.T) {
	for line, want := range map[string]bool{
		"topo": true, "topo --nics": true, "topo -o json": true, "topo capture": true, "topo --input " +
			"svg.xml": false, "version": true, "version -o json": true,
		"": false, "plan": false, "--root / topo": false, "topo --help": false, "topo -h": false, "help topo": false,
		"topo -o svg": false, "topo -o xml": true, "topo -o xml --virtual": false, "topo --output=html": false,
		"exporter": false, "__complete topo": false, "topology": false,
	} {
		if got := frontRuns(strings.Fields(line)); got != want {
			t.Errorf("peerlane %s: %v, want %v", line, got, want)
		}
	}
	if got := behindFront("/usr/bin/peerlane"); got != "/usr/libexec/peerlane/peerlane" {
		t.Errorf("full program is %s", got)
	}
}

// The front, which users start most, must not link packages that start slowly.
func TestFrontLinksNeitherGRPCNorPrometheus(t *testing.T) {
	c := exec.Command("go", "list", "-tags", "front", "-deps", ".")
	c.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	if len(packages) < 100 {
		t.Fatalf("%d packages are linked", len(packages))
	}
	for _, p := range packages {
		for _, heavy := range []string{"google.golang.org/grpc", "github.com/prometheus/", "net/http", "crypto/tls",
			"html/template", "github.com/peerlane/peerlane/cuda", "github.com/peerlane/peerlane/relay/transport"} {
			if p == heavy || strings.HasPrefix(p, heavy+"/") || strings.HasSuffix(heavy, "/") && strings.HasPrefix(p, heavy) {
				t.Errorf("%s is linked", p)
			}
		}
	}
}
