package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	versions "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/peerlane/peerlane/internal/fault"
)

// askTimeout limits the time for an answer of a daemon or a program.
const askTimeout = 10 * time.Second

// daemons maps engines to the functions that ask the daemon at a socket for its version.
var daemons = map[string]func(ctx context.Context, address string) (version string, err error){
	docker:     askDocker,
	Containerd: askContainerd,
}

// errOther reports that another engine answers at the socket.
var errOther = errors.New("another engine answers at this socket")

// askEngine returns the version of an engine of this host: from the running daemon at the socket,
// or else from the program. Without a daemon and a program the error is ErrNotInstalled.
func askEngine(ctx context.Context, name, socket string) (reply, error) {
	var silent error
	if daemon := daemons[name]; daemon != nil {
		version, err := askDaemon(ctx, daemon, socket)
		if err == nil {
			return reply{Version: strings.TrimPrefix(version, "v"), Daemon: true}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, errOther) {
			silent = &fault.Error{Operation: "ask " + name + " at", Object: socket, Cause: err}
		}
	}
	version, err := askProgram(ctx, name)
	switch {
	case err == nil:
		return reply{Version: version}, nil
	case silent == nil && errors.Is(err, exec.ErrNotFound):
		return reply{}, fmt.Errorf("%w: %w", ErrNotInstalled, err)
	}
	return reply{}, errors.Join(silent, err)
}

func askDaemon(
	ctx context.Context,
	daemon func(context.Context, string) (string, error),
	socket string,
) (string, error) {
	if _, err := os.Stat(socket); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	return daemon(ctx, socket)
}

// programs maps engines to their programs, and to the word of the first line of `--version` that
// is the version; 0 means the last word.
var programs = map[string]struct {
	name string
	word int
}{
	docker:     {"dockerd", 3},    // Docker version 28.2.2, build …
	Containerd: {"containerd", 3}, // containerd SOURCE 1.7.24 …
	Podman:     {"podman", 0},     // podman version 4.3.1
	CRIO:       {"crio", 0},       // crio version 1.30.0
}

func askProgram(ctx context.Context, name string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	program := programs[name]
	text, err := output(ctx, program.name, "--version")
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(text, "\n")
	words := strings.Fields(line)
	at := program.word
	if at == 0 {
		at = len(words)
	}
	if at == 0 || len(words) < at {
		return "", fmt.Errorf("%s --version says %q", program.name, line)
	}
	return strings.TrimPrefix(strings.TrimSuffix(words[at-1], ","), "v"), nil
}

// output returns the standard output of a program.
func output(ctx context.Context, program string, arguments ...string) (string, error) {
	c := exec.CommandContext(ctx, program, arguments...)
	c.WaitDelay = time.Second
	var stderr bytes.Buffer
	c.Stderr = &stderr
	text, err := c.Output()
	if err != nil {
		line, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		return "", outputError(program, err, line)
	}
	return strings.TrimSpace(string(text)), nil
}

func outputError(program string, err error, stderr string) error {
	if stderr == "" {
		return fmt.Errorf("%s: %w", program, err)
	}
	return fmt.Errorf("%s: %w: %s", program, err, stderr)
}

// askDocker asks the daemon through its API. The docker client would connect to the host of
// DOCKER_HOST or of a context, which may be another host or Podman.
func askDocker(ctx context.Context, socket string) (version string, err error) {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/version", nil)
	if err != nil {
		return "", err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	var answer struct {
		Version    string
		Components []struct{ Name string }
	}
	if response.StatusCode != http.StatusOK {
		return "", errors.New(response.Status)
	}
	if err := json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(&answer); err != nil {
		return "", err
	}
	for _, one := range answer.Components {
		if strings.HasPrefix(one.Name, "Podman") {
			return "", errOther
		}
	}
	return answer.Version, nil
}

// askContainerd asks the daemon through the module of containerd's API: the containerd client
// would add a hundred modules.
func askContainerd(ctx context.Context, socket string) (version string, err error) {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	answer, err := versions.NewVersionClient(conn).Version(ctx, &emptypb.Empty{})
	return answer.GetVersion(), err
}
