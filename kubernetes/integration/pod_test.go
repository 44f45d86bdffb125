//go:build cluster

package integration

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/peerlane/peerlane/integration/across"
	"github.com/peerlane/peerlane/relay/client"
)

// The test binary is also the program in the pods: `test exchange NAME OTHER SIDE` exchanges messages
// with the pod OTHER, once for each file round-N of the directory of reports, until it is killed.

// reportsDir is the directory of reports in a pod.
const reportsDir = "/reports"

// bytesEachWay is the amount of data of a round in each direction.
const bytesPerDirection = 64 << 20

// report is the result of a round in a pod.
type report struct {
	Error string `json:"error,omitempty"`
	// Output is the output of a harness.
	Output string `json:"output,omitempty"`
	// Exchange is the result of the exchange; every received byte is compared.
	Exchange across.Report `json:"exchange"`
	// GPUs are the device nodes of GPUs.
	GPUs    []string `json:"gpus"`
	Socket  bool     `json:"socket"` // the relay's socket exists
	UID     int      `json:"uid"`
	Status  string   `json:"status"`  // /proc/self/status
	Network string   `json:"network"` // the network namespace
	Users   string   `json:"users"`   // the user namespace
}

func roundFile(round int) string               { return fmt.Sprintf("round-%d", round) }
func reportFile(name string, round int) string { return fmt.Sprintf("%s.report-%d", name, round) }
func handleFile(name string, round int) string { return fmt.Sprintf("%s.handle-%d", name, round) }
func inReports(name string) string             { return filepath.Join(reportsDir, name) }

// side numbers the two pods of an exchange.
func side(name, other string) int {
	if name > other {
		return 1
	}
	return 0
}

// exchangeOnce is the program of a pod of an indexed job with two pods: round 1, which fails unless every
// byte arrives.
func exchangeOnce() error {
	names := map[string][2]string{"0": {"job-0", "job-1"}, "1": {"job-1", "job-0"}}
	of, ok := names[os.Getenv("JOB_COMPLETION_INDEX")]
	if !ok {
		return errors.New("JOB_COMPLETION_INDEX is neither 0 nor 1")
	}
	ended := make(chan error, 1)
	go func() { ended <- exchange(of[0], of[1]) }()
	go func() { ended <- wait(reportFile(of[1], 1), nil) }() // both pods are done
	var r report
	if err := wait(reportFile(of[0], 1), &r); err != nil {
		return err
	}
	if r.Error != "" || r.Exchange.BytesReceived < bytesPerDirection || len(r.Exchange.Failures) > 0 {
		return fmt.Errorf("error %q, exchange %+v", r.Error, r.Exchange)
	}
	return <-ended
}

// exchange is the program of a pod.
func exchange(name, other string) error {
	in, orders := io.Pipe()
	lines, out := io.Pipe()
	go func() { out.CloseWithError(across.Serve(in, out, client.DefaultSocket)) }()
	decoder := json.NewDecoder(lines)
	for round := 1; ; {
		var line across.Line
		if err := decoder.Decode(&line); err != nil {
			return errors.Join(err, write(reportFile(name, round), look(report{Error: err.Error()})))
		}
		switch line.Kind {
		case across.Listening:
			if err := wait(roundFile(round), nil); err != nil {
				return err
			}
			if err := write(handleFile(name, round), line.Handle); err != nil {
				return err
			}
			order := across.Order{Do: across.Connect, Side: side(name, other), Seed: uint64(round),
				Bytes: bytesPerDirection, Largest: 4 << 20}
			if err := wait(handleFile(other, round), &order.Handle); err != nil {
				return err
			}
			if err := json.NewEncoder(orders).Encode(order); err != nil {
				return err
			}
		case across.Done, across.Failed:
			if err := write(reportFile(name, round), look(report{Error: line.Error, Exchange: line.Report})); err != nil {
				return err
			}
			round++
		}
	}
}

// wait waits for a file of the directory of reports, and reads it into value.
func wait(name string, value any) error {
	for ; ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(inReports(name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil || value == nil:
			return err
		}
		return json.Unmarshal(text, value)
	}
}

// write writes a file of the directory of reports atomically.
func write(name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	temporary := inReports(name + ".new")
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, inReports(name))
}

// look adds the pod's environment to a report.
func look(r report) report {
	r.UID = os.Getuid()
	r.GPUs, _ = filepath.Glob("/dev/nvidia[0-9]*") // the pattern is valid
	_, err := os.Stat(client.DefaultSocket)
	r.Socket = err == nil
	status, err := os.ReadFile("/proc/self/status")
	r.Status = string(status)
	if err == nil {
		r.Network, err = os.Readlink("/proc/self/ns/net")
	}
	if err == nil {
		r.Users, err = os.Readlink("/proc/self/ns/user")
	}
	if err != nil {
		r.Error += err.Error()
	}
	return r
}
