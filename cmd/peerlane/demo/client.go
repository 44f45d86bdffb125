package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cmd/peerlane/measure"
	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// ClientOptions are the options of the process in a container.
type ClientOptions struct {
	Socket string
	// Name is "A" or "B".
	Name   string
	Script Script
}

// RunClient runs in a container: it reads the injected environment, attaches to its relay, and
// exchanges messages with the other container according to the script. RunClient exchanges lines
// of JSON with the orchestrator.
func RunClient(in io.Reader, out io.Writer, o ClientOptions) error {
	// A CUDA context belongs to one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := &demoClient{ClientOptions: o, out: json.NewEncoder(out)}
	lines := bufio.NewReader(in)
	if o.Socket == "-" {
		path, err := lines.ReadString('\n')
		if err != nil {
			return fmt.Errorf("wait for the path of the relay's socket: %w", err)
		}
		c.Socket = strings.TrimSpace(path)
	}
	err := c.run(json.NewDecoder(lines))
	if err != nil {
		return errors.Join(err, c.out.Encode(event{Kind: "failed", Error: err.Error()}))
	}
	return c.out.Encode(event{Kind: "done", Result: &c.result})
}

type demoClient struct {
	ClientOptions
	out    *json.Encoder
	result Client

	driver *cuda.Driver
	*measure.Client
	// outgoing and incoming are host memory to fill and compare the buffers.
	outgoing, incoming []byte
}

func (c *demoClient) other() string {
	if c.Name == "A" {
		return "B"
	}
	return "A"
}

func (c *demoClient) run(orders *json.Decoder) (err error) {
	injected, err := lookAround()
	if err != nil {
		return err
	}
	if c.driver, err = cuda.Open(); err == nil {
		injected.GPUs, err = visibleGPUs(c.driver)
	}
	if err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
		defer cancel()
		return client.WithoutGPU(ctx, c.Socket, err)
	}
	if err := c.out.Encode(event{Kind: "injected", Injected: injected}); err != nil {
		return err
	}
	gpu, err := wire.ParseGPU(injected.GPUs[0])
	if err != nil {
		return err
	}
	device, err := c.driver.DeviceGet(0)
	if err != nil {
		return err
	}
	if _, err := c.driver.CtxCreate(device, cuda.CtxOptions{}); err != nil {
		return fmt.Errorf("a context on this container's GPU: %w", err)
	}
	if err := c.attach(device, gpu); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.connect(orders); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"exchanging verified messages", c.exchange},
		{"measuring rates", c.rates},
		{"measuring the hand-off", c.handOff},
		{"reading the relay's counters", c.counters},
	} {
		if err := c.out.Encode(event{Kind: "progress", Step: step.name}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
		err := step.do(ctx)
		cancel()
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// lookAround reads the injected files and variables in a container.
func lookAround() (*Injected, error) {
	i := &Injected{Environment: map[string]string{}}
	for _, pattern := range []string{"/dev/nvidia*", "/dev/infiniband/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		i.Devices = append(i.Devices, found...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		// proc_pid_mountinfo(5): id parent major:minor root point options optional... - type
		// source super
		f := strings.Fields(line)
		if len(f) < 7 || !strings.Contains(f[4], "peerlane") && !strings.Contains(f[4], "cuda") {
			continue
		}
		propagation := "private"
		if f[6] != "-" {
			propagation = f[6]
		}
		// A later mount on a mount point hides the earlier mount, as the relay's socket hides the
		// anchor of the specification.
		i.Mounts = slices.DeleteFunc(i.Mounts, func(m string) bool { return strings.HasPrefix(m, f[4]+" ") })
		i.Mounts = append(i.Mounts, fmt.Sprintf("%s (%s, %s)", f[4], f[5], propagation))
	}
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, "PEERLANE_") || strings.HasPrefix(name, "NVIDIA_") || strings.HasPrefix(name, "CUDA_") {
			i.Environment[name] = value
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	i.PIDs = len(processes)
	return i, nil
}

func visibleGPUs(d *cuda.Driver) ([]string, error) {
	n, err := d.DeviceCount()
	if err != nil {
		return nil, err
	}
	var list []string
	for i := range n {
		g, err := d.DeviceGet(i)
		if err != nil {
			return nil, err
		}
		uuid, err := d.DeviceUUID(g)
		if err != nil {
			return nil, err
		}
		list = append(list, uuid)
	}
	if len(list) == 0 {
		return nil, errors.New("CUDA shows no GPU")
	}
	return list, nil
}

func (c *demoClient) attach(device cuda.Device, gpu wire.UUID) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
	defer cancel()
	start := time.Now()
	var err error
	if c.Client, err = measure.AttachWithStaging(ctx, c.driver, device, gpu, c.Socket, c.Script.largest(),
		c.Script.Staging); err != nil {
		return err
	}
	c.result.ProtocolVersion = c.Session.Version()
	c.result.FirstAttach = time.Since(start)
	for _, host := range []*[]byte{&c.outgoing, &c.incoming} {
		if *host, err = measure.HostBuffer(c.driver, c.Script.largest()); err != nil {
			return errors.Join(err, c.Close())
		}
	}
	return nil
}

// connect connects both directions.
func (c *demoClient) connect(orders *json.Decoder) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.Script.Timeout)
	defer cancel()
	listener, err := c.Session.Listen(ctx, c.GPU)
	if err != nil {
		return err
	}
	if err := c.out.Encode(event{Kind: "listening", Handle: listener.Handle()}); err != nil {
		return err
	}
	var next order
	if err := orders.Decode(&next); err != nil {
		return fmt.Errorf("wait for the other container's handle: %w", err)
	}
	if c.Sending, err = c.Session.Connect(ctx, c.GPU, next.Connect); err != nil {
		return err
	}
	if c.Receiving, err = listener.Accept(ctx); err != nil {
		return err
	}
	route := map[uint32]string{wire.RouteStaged: "staged", wire.RouteDirect: "direct"}[c.Sending.Route]
	return c.out.Encode(event{Kind: "connected", Connection: c.Sending.Peer, Route: route})
}

// exchange sends and receives the script's messages at the same time, and hands them over by
// timelines: this client's stream reports that a message is ready, and waits for the arrival of a
// message.
func (c *demoClient) exchange(ctx context.Context) error {
	done := uint64(0)
	reported := uint64(0)
	for i, n := range c.Script.sizes() {
		value := uint64(i + 1)
		receive, err := c.Receiving.Receive(c.Incoming.Memory, 0, n, client.Tag(value),
			client.Signal(c.Timeline(measure.Arrived), value))
		if err != nil {
			return err
		}
		patternOf(c.Script.Seed, c.Name, i).fill(c.outgoing[:n])
		if err := c.driver.MemcpyHtoDAsync(c.Outgoing.Ptr, unsafe.Pointer(&c.outgoing[0]), n, c.Outgoing.Stream); err != nil {
			return err
		}
		if err := c.CopyOut(n); err != nil {
			return err
		}
		if err := c.Streams.Write(c.Outgoing.Stream, c.Timeline(measure.Filled), value); err != nil {
			return err
		}
		send, err := c.Sending.Send(c.Outgoing.Memory, 0, n, client.Tag(value),
			client.After(c.Timeline(measure.Filled), value))
		if err != nil {
			return err
		}
		if err := c.Streams.Wait(c.Incoming.Stream, c.Timeline(measure.Arrived), value); err != nil {
			return err
		}
		if err := c.CopyIn(n); err != nil {
			return err
		}
		if err := c.driver.MemcpyDtoHAsync(unsafe.Pointer(&c.incoming[0]), c.Incoming.Ptr, n, c.Incoming.Stream); err != nil {
			return err
		}
		for _, op := range []*client.Operation{receive, send} {
			moved, err := op.Wait(ctx)
			if err != nil {
				return fmt.Errorf("message %d of %d bytes: %w", i, n, err)
			}
			if moved != n {
				return fmt.Errorf("message %d: %d of %d bytes moved", i, moved, n)
			}
		}
		if err := c.driver.StreamSynchronize(c.Incoming.Stream); err != nil {
			return err
		}
		if err := patternOf(c.Script.Seed, c.other(), i).check(c.incoming[:n]); err != nil {
			return fmt.Errorf("message %d from container %s is WRONG %w", i, c.other(), err)
		}
		c.result.Sent += n
		c.result.Received += n
		c.result.VerifiedBytes += n
		c.result.Messages++
		if done += n; done-reported >= 16<<20 {
			reported = done
			if err := c.out.Encode(event{Kind: "progress", Step: "exchanging verified messages", Bytes: done}); err != nil {
				return err
			}
		}
	}
	c.result.Verified = true
	return nil
}

// Tags of measurements, different from the tags of the exchange.
const (
	rateTag    = 1 << 32
	handOffTag = 2 << 32
)

// rates measures one direction, A to B, with several messages in flight. The sender measures the
// time from the first post to the last completion, which reports that the bytes are in the
// receiver's memory.
func (c *demoClient) rates(ctx context.Context) error {
	for _, size := range c.Script.RateSizes {
		count := int(max(c.Script.RateBytes/size, uint64(2*c.Script.Depth)))
		// Exchange a message first, so that both sides start together with a warm connection.
		if err := c.meet(ctx, rateTag+size); err != nil {
			return err
		}
		messages := c.NewStream(c.Name == "A", size, c.Script.Depth, rateTag)
		start := time.Now()
		var flight []*client.Operation
		for posted := 0; posted < count || len(flight) > 0; {
			if posted < count && len(flight) < messages.Depth {
				op, err := messages.Post()
				if err != nil {
					return err
				}
				flight = append(flight, op)
				posted++
				continue
			}
			if _, err := flight[0].Wait(ctx); err != nil {
				return fmt.Errorf("messages of %d bytes: %w", size, err)
			}
			flight = flight[1:]
		}
		if err := messages.End(); err != nil {
			return err
		}
		if c.Name == "A" {
			c.result.Rates = append(c.result.Rates, Rate{size,
				float64(size) * float64(count) / time.Since(start).Seconds() / 1e9})
			c.result.Sent += size * uint64(count)
		} else {
			c.result.Received += size * uint64(count)
		}
	}
	return nil
}

// meet synchronises the two clients.
func (c *demoClient) meet(ctx context.Context, tag uint64) error {
	c.result.Sent += 8
	c.result.Received += 8
	return c.Meet(ctx, tag)
}

func (c *demoClient) handOff(ctx context.Context) error {
	if c.Script.Rounds == 0 {
		return nil
	}
	times, err := c.HandOff(ctx, c.Name == "A", c.Script.Rounds, uint64(len(c.Script.sizes())), handOffTag)
	if err != nil {
		return err
	}
	c.result.Sent += 8 * uint64(len(times))
	c.result.Received += 8 * uint64(len(times))
	if c.Name == "A" && len(times) > 0 {
		slices.Sort(times)
		c.result.HandOffMedian, c.result.HandOff99 = times[len(times)/2], times[len(times)*99/100]
	}
	return nil
}

func (c *demoClient) counters(ctx context.Context) error {
	s, err := c.Session.Statistics(ctx)
	if err != nil {
		return err
	}
	c.result.Relay = RelayCounters{Sent: s.Sent, Received: s.Received, Direct: s.Direct, Staged: s.Staged,
		Contexts: int(s.Contexts)}
	for _, g := range s.Server[:s.Servers] {
		c.result.Relay.Servers = append(c.result.Relay.Servers, ServerCounter{GPU: g.GPU.GPU(), In: g.In, Out: g.Out})
	}
	return nil
}
