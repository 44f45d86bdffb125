package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	versions "github.com/containerd/containerd/api/services/version/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"
)

// askTime is how long an engine may think.
const askTime = 10 * time.Second

// Ask asks an engine for its version: its daemon, if that runs, and the program
// otherwise. Of containerd it is the daemon at an address; Docker's is where
// DOCKER_HOST says.
func Ask(ctx context.Context, name, address string) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	switch name {
	case Docker:
		text, err := output(ctx, "docker", "version", "--format", "{{.Server.Version}}")
		if err == nil {
			return Answer{Version: text, Daemon: true}, nil
		}
		program, without := output(ctx, "dockerd", "--version") // Docker version 28.2.2, build …
		if without != nil {
			return Answer{}, errors.Join(err, without)
		}
		return Answer{Version: numbers.FindString(program)}, nil
	case Containerd:
		answer, err := askContainerd(ctx, address)
		if err == nil {
			return answer, nil
		}
		program, without := output(ctx, "containerd", "--version") // containerd SOURCE 1.7.24 …
		if without != nil {
			return Answer{}, errors.Join(err, without)
		}
		words := strings.Fields(program)
		if len(words) < 3 {
			return Answer{}, fmt.Errorf("containerd --version says %q", program)
		}
		return Answer{Version: strings.TrimPrefix(words[2], "v")}, nil
	}
	program, err := output(ctx, name, "--version") // podman version 4.3.1; crio version 1.30.0, and lines
	line, _, _ := strings.Cut(program, "\n")
	words := strings.Fields(line)
	if err != nil || len(words) == 0 {
		return Answer{}, errors.Join(err, fmt.Errorf("%s --version says %q", name, line))
	}
	return Answer{Version: words[len(words)-1]}, nil
}

// output is what a program says.
func output(ctx context.Context, program string, arguments ...string) (string, error) {
	c := exec.CommandContext(ctx, program, arguments...)
	c.WaitDelay = time.Second
	var said bytes.Buffer
	c.Stderr = &said
	text, err := c.Output()
	if err != nil {
		line, _, _ := strings.Cut(strings.TrimSpace(said.String()), "\n")
		return "", saying(program, err, line)
	}
	return strings.TrimSpace(string(text)), nil
}

func saying(program string, err error, said string) error {
	if said == "" {
		return fmt.Errorf("%s: %w", program, err)
	}
	return fmt.Errorf("%s: %w: %s", program, err, said)
}

// askContainerd asks the daemon, by the API's own module: containerd's whole client
// would bring a hundred more.
func askContainerd(ctx context.Context, address string) (a Answer, err error) {
	conn, err := grpc.NewClient("unix://"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return a, fmt.Errorf("containerd at %s: %w", address, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	version, err := versions.NewVersionClient(conn).Version(ctx, &emptypb.Empty{})
	if err != nil {
		return a, fmt.Errorf("containerd at %s: %w", address, err)
	}
	return Answer{Version: strings.TrimPrefix(version.Version, "v"), Daemon: true}, nil
}
