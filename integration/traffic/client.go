package traffic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/wire"
)

// Kinds of a client's buffers.
const (
	MemoryGPU     = "gpu"     // exported
	MemoryStaging = "staging" // on a server GPU, made by the relay: the client copies
	MemoryHost    = "host"
)

// order is a command for a client.
type order struct {
	Do     string
	Socket string      `json:",omitempty"`
	Bytes  uint64      `json:",omitempty"` // per buffer
	Out    string      `json:",omitempty"` // MemoryGPU and so on
	In     string      `json:",omitempty"`
	Handle wire.Handle // of doConnect
	Side   int         `json:",omitempty"` // 0 or 1, of doRound
	Round  round
}

// Commands for a client.
const (
	doAttach  = "attach"
	doListen  = "listen"
	doConnect = "connect"
	doAccept  = "accept"
	doRound   = "round"
	doDetach  = "detach"
)

// reply is a client's answer.
type reply struct {
	Error  string      `json:",omitempty"`
	Status wire.Status `json:",omitempty"`
	Handle wire.Handle
	Route  uint32 `json:",omitempty"`
	// Messages and Decades are of doRound: received and verified, also in a failed round.
	Messages int      `json:",omitempty"`
	Bytes    uint64   `json:",omitempty"`
	Decades  Decades  // messages by size
	Wrong    []string `json:",omitempty"`
}

// Decades counts messages by size: 1 to 9 bytes, 10 to 99, and so on.
type Decades [9]int

func (d *Decades) count(size uint64) {
	i := 0
	for ; size >= 10 && i < len(d)-1; size /= 10 {
		i++
	}
	d[i]++
}

func (d *Decades) add(more Decades) {
	for i := range d {
		d[i] += more[i]
	}
}

// Serve is the main loop of a client process: it executes orders until in ends.
func Serve(in io.Reader, out io.Writer) error {
	// A CUDA context is current on a single thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	orders, replies := json.NewDecoder(in), json.NewEncoder(out)
	var p process
	for {
		var o order
		err := orders.Decode(&o)
		if errors.Is(err, io.EOF) {
			return p.detach()
		}
		if err != nil {
			return err
		}
		var r reply
		if err := p.do(o, &r); err != nil {
			r.Error, r.Status = fmt.Sprintf("%s: %v", o.Do, err), wire.StatusOf(err)
		}
		if err := replies.Encode(r); err != nil {
			return err
		}
	}
}

// process is a client: CUDA on the visible GPU, and a session while attached.
type process struct {
	driver  *cuda.Driver
	device  cuda.Device
	gpu     wire.UUID
	stream  cuda.Stream // of sent messages
	verify  *verifier
	own     [2]cuda.Ptr // exported GPU memory, for sent and received messages
	handles [2]cuda.MemHandle
	bytes   uint64

	session   *client.Session
	lines     *client.StreamTimelines
	buffers   [2]buffer
	listener  *client.Listener
	sending   *client.Connection
	receiving *client.Connection
	rounds    uint64 // of this session
}

// buffer is the memory that messages are sent out of or received into.
type buffer struct {
	memory *client.Memory
	ptr    cuda.Ptr // 0 for host memory
}

const outgoing, incoming = 0, 1

func (p *process) do(o order, r *reply) (err error) {
	ctx := context.Background() // the parent kills a client that does not end
	switch o.Do {
	case doAttach:
		return p.attach(ctx, o)
	case doListen:
		if p.listener, err = p.session.Listen(ctx, p.gpu); err == nil {
			r.Handle = p.listener.Handle()
		}
	case doConnect:
		if p.sending, err = p.session.Connect(ctx, p.gpu, o.Handle); err == nil {
			r.Route = p.sending.Route
		}
	case doAccept:
		if p.receiving, err = p.listener.Accept(ctx); err == nil {
			err = p.listener.Close(ctx)
		}
	case doRound:
		return p.round(ctx, o, r)
	case doDetach:
		return p.detach()
	default:
		err = errors.New("unknown order")
	}
	return err
}

// start initialises CUDA at the first call.
func (p *process) start(bytes uint64) error {
	if p.driver != nil {
		return nil
	}
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	if p.device, err = d.DeviceGet(0); err != nil {
		return err
	}
	uuid, err := d.DeviceUUID(p.device)
	if err != nil {
		return err
	}
	if p.gpu, err = wire.ParseGPU(uuid); err != nil {
		return err
	}
	if _, err = d.CtxCreate(p.device, cuda.CtxOptions{}); err != nil {
		return err
	}
	granule, err := d.MemGranularity(p.device)
	if err != nil {
		return err
	}
	p.bytes = (bytes + granule - 1) / granule * granule
	for i := range p.own {
		if p.handles[i], err = d.MemCreate(p.device, p.bytes, cuda.MemOptions{Exportable: true, RDMA: true}); err != nil {
			return err
		}
		if p.own[i], err = d.MemAddressReserve(p.bytes, 0); err != nil {
			return err
		}
		if err := d.MemMap(p.own[i], p.bytes, 0, p.handles[i]); err != nil {
			return err
		}
		if err := d.MemSetAccess(p.own[i], p.bytes, cuda.Access{Device: p.device, Write: true}); err != nil {
			return err
		}
	}
	if p.stream, err = d.StreamCreate(); err != nil {
		return err
	}
	if p.verify, err = newVerifier(d, p.device, p.bytes); err != nil {
		return err
	}
	p.driver = d
	return nil
}

// attach opens a session and registers both buffers with the relay.
func (p *process) attach(ctx context.Context, o order) error {
	if p.session != nil {
		return errors.New("client already attached")
	}
	if err := p.start(o.Bytes); err != nil {
		return err
	}
	s, err := client.Dial(ctx, o.Socket, p.gpu)
	if err != nil {
		return err
	}
	p.session, p.rounds = s, 0
	for i, kind := range []string{o.Out, o.In} {
		access := []uint32{wire.AccessSend, wire.AccessReceive}[i]
		if p.buffers[i], err = p.buffer(ctx, i, kind, access); err != nil {
			return errors.Join(fmt.Errorf("%s memory: %w", kind, err), p.detach())
		}
	}
	if p.lines, err = s.RegisterTimelines(p.driver); err != nil {
		return errors.Join(err, p.detach())
	}
	return nil
}

func (p *process) buffer(ctx context.Context, i int, kind string, access uint32) (b buffer, err error) {
	switch kind {
	case MemoryStaging:
		if b.memory, err = p.session.Staging(ctx, p.driver,
			client.Staging{Bytes: p.bytes, GPU: p.gpu, Access: access}); err == nil {
			b.ptr = b.memory.Ptr
		}
		return b, err
	case MemoryHost:
		b.memory, err = p.session.HostMemory(ctx, client.HostMemory{Bytes: p.bytes, GPU: p.gpu, Access: access})
		return b, err
	}
	fd, err := p.driver.MemExportFD(p.handles[i])
	if err != nil {
		return b, err
	}
	file := os.NewFile(uintptr(fd), "gpu-memory")
	defer file.Close()
	b.ptr = p.own[i]
	b.memory, err = p.session.Export(ctx, client.Allocation{FD: fd, Bytes: p.bytes, GPU: p.gpu, Access: access})
	return b, err
}

// detach closes the connections and then the session: afterwards no stream waits for a connection,
// and the client can wait for the streams.
func (p *process) detach() error {
	if p.session == nil {
		return nil
	}
	var err error
	for _, c := range []*client.Connection{p.sending, p.receiving} {
		if c != nil && p.session.Err() == nil {
			_ = c.Close(context.Background()) // the session may break meanwhile
		}
	}
	if p.lines != nil {
		err = errors.Join(p.driver.StreamSynchronize(p.stream), p.driver.StreamSynchronize(p.verify.stream),
			p.lines.Unregister())
	}
	err = errors.Join(err, p.session.Close())
	p.session, p.lines, p.listener, p.sending, p.receiving = nil, nil, nil, nil, nil
	return err
}

// Timelines of a session.
const (
	filledLine  = 0
	sendTurns   = 1
	receiveTurn = 2
	arrivedLine = 64 // and the next atOnce - 1 lines, one per message: messages may end in any order
)

// round sends the messages of one side, and receives and compares the messages of the other side.
// If a message fails, round compares the other messages and closes the session; if a post fails,
// round only closes the session.
func (p *process) round(ctx context.Context, o order, r *reply) error {
	p.rounds++
	sends, receives := o.Round.messages(o.Side, p.bytes), o.Round.messages(1-o.Side, p.bytes)
	canary := o.Round.canary(1 - o.Side)
	into := p.buffers[incoming]
	// Before the first message can arrive.
	if into.ptr == 0 {
		canary.Fill(into.memory.Data)
		p.verify.used = 0
	} else if err := errors.Join(p.verify.prepare(into.ptr, p.bytes, canary),
		p.driver.StreamSynchronize(p.verify.stream)); err != nil {
		return err
	}
	arriving, err := p.receive(o.Round, receives)
	var leaving []*client.Operation
	if err == nil {
		leaving, err = p.send(o.Round, sends)
	}
	if err != nil {
		// No posted operation continues after the session.
		return errors.Join(err, p.detach())
	}
	failed := make([]error, len(arriving))
	for i, op := range arriving {
		n, err := op.Wait(ctx)
		if err == nil && n != receives[i].size {
			r.Wrong = append(r.Wrong, fmt.Sprintf("message %d of %d bytes has %d", i, receives[i].size, n))
		}
		if failed[i] = err; err == nil && into.ptr != 0 && o.Round.Hand == HandPlain {
			if err := p.verify.read(i, receives[i], into.ptr); err != nil {
				return err
			}
		}
	}
	for _, op := range leaving {
		_, err := op.Wait(ctx)
		failed = append(failed, err)
	}
	if err := errors.Join(p.driver.StreamSynchronize(p.stream), p.driver.StreamSynchronize(p.verify.stream)); err != nil {
		return err
	}
	for i, m := range receives {
		if failed[i] != nil {
			continue
		}
		wrong := ""
		if into.ptr == 0 {
			wrong = m.compare(into.memory.Data[m.to-margin:m.to+m.size+margin], m.to-margin, canary)
		} else {
			wrong = p.verify.wrong(i, m, canary)
		}
		if wrong != "" {
			r.Wrong = append(r.Wrong, fmt.Sprintf("round %x, %s, message %d: %s", o.Round.Seed, o.Round.Hand, i, wrong))
		}
		r.Messages++
		r.Bytes += m.size
		r.Decades.count(m.size)
	}
	for _, err := range failed {
		if err != nil {
			return errors.Join(err, p.detach())
		}
	}
	return nil
}

// receive posts receives; for plain receives the stream reads each message after arrival.
func (p *process) receive(r round, list []message) ([]*client.Operation, error) {
	b, c := p.buffers[incoming], p.receiving
	hand := r.Hand
	if b.ptr == 0 {
		hand = HandPlain
	}
	var turns *client.HandOver
	if hand == HandOver {
		var err error
		if turns, err = p.session.HandOver(receiveTurn, wire.TurnRelay); err != nil {
			return nil, err
		}
	}
	var posted []*client.Operation
	for i, m := range list {
		options := []client.Option{client.Tag(uint64(i))}
		var line *client.Timeline
		switch hand {
		case HandTimeline:
			var err error
			if line, err = p.session.Timeline(arrivedLine + uint32(i)); err != nil {
				return posted, err
			}
			options = append(options, client.Signal(line, p.rounds))
		case HandOver:
			options = append(options, client.InTurn(turns))
		}
		op, err := c.Receive(b.memory, m.to, m.size, options...)
		if err != nil {
			return posted, err
		}
		posted = append(posted, op)
		switch hand {
		case HandTimeline:
			err = errors.Join(p.lines.Wait(p.verify.stream, line, p.rounds), p.verify.read(i, m, b.ptr))
		case HandOver:
			// Take fails after the end of the hand-over, and so does the operation.
			if err = p.lines.Take(p.verify.stream, turns); err == nil {
				err = errors.Join(p.verify.read(i, m, b.ptr), p.lines.Give(p.verify.stream, turns))
			}
		}
		if err != nil {
			return posted, err
		}
	}
	return posted, nil
}

// send fills and posts sends.
func (p *process) send(r round, list []message) ([]*client.Operation, error) {
	b, c := p.buffers[outgoing], p.sending
	hand := r.Hand
	if b.ptr == 0 {
		hand = HandPlain
	}
	filled, err := p.session.Timeline(filledLine)
	if err != nil {
		return nil, err
	}
	var turns *client.HandOver
	if hand == HandOver {
		if turns, err = p.session.HandOver(sendTurns, wire.TurnStream); err != nil {
			return nil, err
		}
	}
	if hand == HandPlain {
		for _, m := range list {
			if err := p.fill(b, m); err != nil {
				return nil, err
			}
		}
		if err := p.driver.StreamSynchronize(p.stream); err != nil {
			return nil, err
		}
	}
	var posted []*client.Operation
	for i, m := range list {
		options := []client.Option{client.Tag(uint64(i))}
		switch hand {
		case HandTimeline:
			value := (p.rounds-1)*atOnce + uint64(i) + 1
			err = errors.Join(p.fill(b, m), p.lines.Write(p.stream, filled, value))
			options = append(options, client.After(filled, value))
		case HandOver:
			if err = p.lines.Take(p.stream, turns); err == nil {
				err = errors.Join(p.fill(b, m), p.lines.Give(p.stream, turns))
			}
			options = append(options, client.InTurn(turns))
		}
		if err != nil {
			return posted, err
		}
		op, err := c.Send(b.memory, m.from, m.size, options...)
		if err != nil {
			return posted, err
		}
		posted = append(posted, op)
	}
	return posted, nil
}

// fill writes a message, in whole words.
func (p *process) fill(b buffer, m message) error {
	begin, end := m.from/8*8, (m.from+m.size+7)/8*8
	if b.ptr == 0 {
		m.pattern.Fill(b.memory.Data[begin:end])
		return nil
	}
	return p.verify.kernels.Fill(p.stream, b.ptr+cuda.Ptr(begin), end-begin, kernels.Pattern{Seed: m.pattern.Seed})
}
