package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/cmd/peerlane/exporter"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/testutil"
)

func TestExportServesMetricsUntilItsContextEnds(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	if err := export(ctx, paths.New(t.TempDir()), address); err == nil {
		t.Error("an address in use is no error")
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- export(ctx, paths.New(t.TempDir()), address) }()
	testutil.Succeeds(t, "a scrape", func() error {
		r, err := http.Get("http://" + address + "/metrics")
		if err != nil {
			return err
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		if err == nil && !strings.Contains(string(text), `peerlane_relays{state="ready"} 0`) {
			t.Errorf("%s: %s", r.Status, text)
		}
		return err
	})
	cancel()
	if err := testutil.Receive(t, "the end", ended); err != nil {
		t.Error(err)
	}
}

func TestExportOfSeveralTenantsIsRefused(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := os.MkdirAll(l.Config(), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(l.ConfigFile(), []byte("[cdi]\ntenancy = \"multi\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := export(t.Context(), l, "127.0.0.1:0"); !errors.Is(err, exporter.ErrTenants) {
		t.Error(err)
	}
}
