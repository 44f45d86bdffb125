package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	versions "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/peerlane/peerlane/internal/fault"
)

// daemon implements the version service of containerd.
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
	got, err := askEngine(context.Background(), Containerd, address)
	if want := (reply{Version: "2.4.2", Daemon: true}); err != nil || got != want {
		t.Errorf("askEngine returned %+v, %v, want %+v", got, err, want)
	}
}

// Without a daemon, askEngine runs the programs.
func TestProgramsAreAsked(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":/bin:/usr/bin")
	program := func(name, script string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	program("docker", "echo 1.2.3") // may be Podman's, or connect to another host
	program("dockerd", `echo "Docker version 20.10.24+dfsg1, build 297e128"`)
	program("containerd", `echo "containerd github.com/containerd/containerd/v2 v2.0.5 abc"`)
	program("podman", `echo "podman version 5.4.2"`)
	program("crio", `printf "crio version 1.30.1\nVersion: 1.30.1\n"`)
	ask := func(name string) reply {
		t.Helper()
		got, err := askEngine(context.Background(), name, filepath.Join(dir, "none"))
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	for name, want := range map[string]reply{
		docker: {Version: "20.10.24+dfsg1"}, Containerd: {Version: "2.0.5"}, Podman: {Version: "5.4.2"},
		CRIO: {Version: "1.30.1"},
	} {
		if got := ask(name); got != want {
			t.Errorf("%s: askEngine returned %+v, want %+v", name, got, want)
		}
	}
	program("crio", "exit 3")
	var failed *exec.ExitError
	if _, err := askEngine(context.Background(), CRIO, ""); errors.Is(err, ErrNotInstalled) ||
		!errors.As(err, &failed) || failed.ExitCode() != 3 {
		t.Errorf("error %v, want exit status 3", err)
	}
	t.Setenv("PATH", t.TempDir())
	for _, name := range Names {
		if _, err := askEngine(context.Background(), name, filepath.Join(dir, "none")); !errors.Is(err, ErrNotInstalled) {
			t.Errorf("%s: error %v, want %v", name, err, ErrNotInstalled)
		}
	}
	// A daemon that does not answer is an error, not a missing engine.
	for _, name := range []string{docker, Containerd} {
		_, err := askEngine(context.Background(), name, dir)
		if f, ok := errors.AsType[*fault.Error](err); !ok || f.Object != dir || errors.Is(err, ErrNotInstalled) {
			t.Errorf("%s: error %v, want a fault of %s", name, err, dir)
		}
	}
}

// askEngine asks the daemon of this host, not the daemon that the client would ask, and does not
// accept Podman at a socket with Docker's name.
func TestDockerIsAsked(t *testing.T) {
	t.Setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
	t.Setenv("PATH", t.TempDir())
	for _, c := range []struct {
		answer string
		code   int
		want   reply
		// err is nil for any other error.
		err error
	}{
		{`{"Version": "28.2.2", "Components": [{"Name": "Engine"}, {"Name": "containerd"}]}`, 200,
			reply{Version: "28.2.2", Daemon: true}, nil},
		{`{"Version": "19.3.0"}`, 200, reply{Version: "19.3.0", Daemon: true}, nil},
		{`{"Version": "5.4.2", "Components": [{"Name": "Podman Engine"}]}`, 200, reply{}, ErrNotInstalled},
		{`{"message": "it starts"}`, 503, reply{}, nil},
		{`torn`, 200, reply{}, nil},
	} {
		socket := filepath.Join(t.TempDir(), "s")
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/version" {
				c.code = http.StatusNotFound
			}
			w.WriteHeader(c.code)
			fmt.Fprint(w, c.answer)
		}))
		check := s.Listener.Close()
		s.Listener = l
		s.Start()
		got, err := askEngine(context.Background(), docker, socket)
		s.Close()
		if check != nil || got != c.want || (err == nil) != c.want.Daemon ||
			errors.Is(err, ErrNotInstalled) != (c.err != nil) {
			t.Errorf("%s: %+v, %v, want %+v, %v", c.answer, got, err, c.want, c.err)
		}
	}
}
