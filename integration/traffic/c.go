package traffic

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"strconv"
	"time"

	"github.com/peerlane/peerlane/relay/wire"
)

// C is the built example of libpeerlane, relay/libpeerlane/examples/transfer.c.
type C struct {
	Program string
	Library string // the directory of libpeerlane.so.0
}

// LiveInC runs two C programs with libpeerlane: a sender of count messages, and a receiver that
// compares every byte.
func (s *Slot) LiveInC(c C, bytes, count uint64) {
	f := s.fleet
	in := s.pick(s.random)
	begin := time.Now()
	things := f.names(in, s)
	sizes := []string{fmt.Sprint(bytes), fmt.Sprint(count), fmt.Sprint(s.random.Uint32())}
	receiver, handle, err := f.program(c, in[1], append([]string{"receive"}, sizes...)...)
	if err != nil {
		f.failed(err, begin, things)
		return
	}
	things = append(things, receiver.name)
	programs := []*victim{receiver}
	select {
	case line, ok := <-handle:
		if !ok {
			break
		}
		sender, _, err := f.program(c, in[0], append([]string{"send", line}, sizes...)...)
		if err != nil {
			f.failed(err, begin, things)
			_ = receiver.command.Process.Kill()
			break
		}
		things = append(things, sender.name)
		programs = append(programs, sender)
	case <-time.After(patience):
		_ = receiver.command.Process.Kill()
		f.failed(&failure{hangs: true, text: receiver.name + " has no handle: it hangs"}, begin, things)
	}
	var failed error
	limit := time.After(patience)
	for _, p := range programs {
		select {
		case <-p.ended:
		case <-limit:
			_ = p.command.Process.Kill()
			<-p.ended
			failed = errors.Join(failed, &failure{hangs: true, text: p.name + " hangs: " + p.stderr.String()})
			continue
		}
		if p.err != nil {
			failed = errors.Join(failed, p.exitError())
		}
	}
	if failed != nil {
		f.failed(failed, begin, things)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.report.Lives++
	if failed == nil && len(programs) == 2 {
		f.report.Transfers += int(count)
		f.report.Bytes += bytes * count
		f.report.Routes[in[0].Route] += int(count)
		f.report.Hands["C"] += int(count)
		f.report.Pairs[fmt.Sprintf("%d to %d", in[0].gpu.Index, in[1].gpu.Index)] += int(count)
		for range count {
			f.report.Sizes.count(bytes)
		}
	}
}

var statusForm = regexp.MustCompile(`\(status (\d+)\)`)

// exitError returns the error that a program printed at its end.
func (v *victim) exitError() error {
	how := &failure{killed: v.wasKilled(), text: fmt.Sprintf("%s: %v: %s", v.name, v.err, &v.stderr)}
	if m := statusForm.FindStringSubmatch(v.stderr.String()); m != nil {
		n, err := strconv.ParseUint(m[1], 10, 32)
		if err != nil {
			return errors.Join(how, err)
		}
		how.status = wire.Status(n)
	}
	return how
}

// program starts the example. The channel receives the first line of output, and closes at the end.
func (f *Fleet) program(c C, in *container, arguments ...string) (*victim, <-chan string, error) {
	command, err := f.host.Process(context.Background(), in.gpu)
	if err != nil {
		return nil, nil, err
	}
	environment := append(command.Env, "LD_LIBRARY_PATH="+c.Library)
	command = exec.Command(c.Program, append([]string{f.socket(in), in.gpu.UUID}, arguments...)...)
	command.Env = environment
	f.mu.Lock()
	f.clients++
	name := fmt.Sprintf("C client %d", f.clients)
	f.mu.Unlock()
	first := make(chan string, 1)
	v, err := f.begin(name, in, command, func(out io.Reader) {
		lines := bufio.NewScanner(out)
		for sent := false; lines.Scan(); sent = true {
			if !sent {
				first <- lines.Text()
			}
		}
		close(first)
	})
	return v, first, err
}
