package engine

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	versions "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

// daemon is what of containerd is asked.
type daemon struct {
	versions.UnimplementedVersionServer
}

func (daemon) Version(context.Context, *emptypb.Empty) (*versions.VersionResponse, error) {
	return &versions.VersionResponse{Version: "v2.4.2"}, nil
}

func TestContainerdIsAsked(t *testing.T) {
	address := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", address)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	versions.RegisterVersionServer(s, daemon{})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	defer func() {
		s.Stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	got, err := Ask(context.Background(), Containerd, address)
	if want := (Answer{Version: "2.4.2", Daemon: true}); err != nil || got != want {
		t.Errorf("it said %+v, %v, want %+v", got, err, want)
	}
}

// Where no daemon runs, the programs are asked.
func TestProgramsAreAsked(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":/bin:/usr/bin")
	program := func(name, script string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	program("docker", `[ "$2" = --format ] || exit 9; echo 28.2.2`)
	program("dockerd", `echo "Docker version 20.10.24+dfsg1, build 297e128"`)
	program("containerd", `echo "containerd github.com/containerd/containerd/v2 v2.0.5 abc"`)
	program("podman", `echo "podman version 5.4.2"`)
	program("crio", `printf "crio version 1.30.1\nVersion: 1.30.1\n"`)
	ask := func(name string) Answer {
		t.Helper()
		got, err := Ask(context.Background(), name, filepath.Join(dir, "none"))
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	for name, want := range map[string]Answer{
		Docker: {Version: "28.2.2", Daemon: true}, Containerd: {Version: "2.0.5"}, Podman: {Version: "5.4.2"}, CRIO: {Version: "1.30.1"},
	} {
		if got := ask(name); got != want {
			t.Errorf("%s says %+v, want %+v", name, got, want)
		}
	}
	program("docker", `echo "Cannot connect to the Docker daemon" >&2; exit 1`)
	if got, want := ask(Docker), (Answer{Version: "20.10.24"}); got != want {
		t.Errorf("dockerd says %+v, want %+v", got, want)
	}
	program("crio", "exit 3")
	if _, err := Ask(context.Background(), CRIO, ""); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("it said %v", err)
	}
}
