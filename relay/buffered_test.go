package relay_test

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/client"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/wire"
)

// buffering has two containers of a host, and a session of each client.
type buffering struct {
	near
	a, b *client.Session
}

// onOneGPU returns two containers of a host that use GPU 0, or GPUs 0 and 3.
func onOneGPU(t *testing.T, one bool, bytes uint64) *buffering {
	t.Helper()
	h, n, second := newHost(t), &buffering{}, 3
	if one {
		second = 0
	}
	var left, right string
	left, n.sender = h.start("a", launch.RouteDirect, -1, copying(far(0, 1, "nic0")))
	right, n.receiver = h.start("b", launch.RouteDirect, -1, copying(far(second, 2, "nic1")))
	n.a, n.b = attach(t, left), attach(t, right)
	n.from, n.to = sideOf(t, n.a, 0, "GPU", bytes), sideOf(t, n.b, second, "GPU", bytes)
	n.sending, n.receiving, _ = join(t, n.a, 0, n.b, second)
	return n
}

// buffers waits until the sender's relay has buffers, which the first send allocates.
func (n *buffering) buffers(t *testing.T) {
	t.Helper()
	testutil.Until(t, "a buffered send ends before its receive", func() bool {
		send, err := n.sending.Send(n.from.Memory, 0, 1, client.Buffered())
		if err != nil {
			t.Fatal(err)
		}
		early := endsWithin(send, 100*time.Millisecond)
		receive, err := n.receiving.Receive(n.to.Memory, 0, 1)
		for _, op := range []*client.Operation{send, receive} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		return early
	})
}

func endsWithin(op *client.Operation, within time.Duration) bool {
	select {
	case <-op.Done():
		return true
	case <-time.After(within):
		return false
	}
}

// A buffered send between two clients of a GPU ends without a receive, and the sender can write its
// memory again. The receiver gets the bytes of the send, and a flush waits for the delivery.
func TestBufferedSendEndsBeforeReceive(t *testing.T) {
	n := onOneGPU(t, true, 2<<20)
	n.buffers(t)
	for _, size := range []uint64{1, 8, 4097, 64 << 10, 64<<10 + 1, 1 << 20} {
		want := random(t, size)
		n.from.write(5, want)
		send, err := n.sending.Send(n.from.Memory, 5, size, client.Buffered())
		if moved, err := wait(t, send, err); err != nil || moved != size {
			t.Fatalf("%d of %d bytes: %v", moved, size, err)
		}
		n.from.write(5, make([]byte, size))
		flush, err := n.sending.Flush()
		if err != nil {
			t.Fatal(err)
		}
		if endsWithin(flush, 10*time.Millisecond) {
			t.Fatalf("a flush ended before %d bytes were delivered", size)
		}
		receive, err := n.receiving.Receive(n.to.Memory, 3, size)
		for _, op := range []*client.Operation{receive, flush} {
			if _, err := wait(t, op, err); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(n.to.read(3, size), want) {
			t.Fatalf("%d bytes arrived wrong", size)
		}
	}
	send, err := n.sending.Send(n.from.Memory, 0, 1<<20+1, client.Buffered())
	if err != nil {
		t.Fatal(err)
	}
	if endsWithin(send, 10*time.Millisecond) {
		t.Fatal("a send that is larger than a buffer ended before its delivery")
	}
	if err := n.a.Close(); err != nil {
		t.Fatal(err)
	}
}

// Between two GPUs a buffered send ends at its delivery.
func TestBufferedSendBetweenGPUsEndsAtDelivery(t *testing.T) {
	n := onOneGPU(t, false, 2<<20)
	n.pass(t, 8)
	send, err := n.sending.Send(n.from.Memory, 0, 64<<10, client.Buffered())
	if err != nil {
		t.Fatal(err)
	}
	if endsWithin(send, 50*time.Millisecond) {
		t.Fatal("the send ended without a receive")
	}
	receive, err := n.receiving.Receive(n.to.Memory, 0, 64<<10)
	for _, op := range []*client.Operation{send, receive} {
		if _, err := wait(t, op, err); err != nil {
			t.Fatal(err)
		}
	}
}

// More messages than there are buffers, with and without one, arrive once, in their order, after
// the sender has withdrawn its memory.
func TestBufferedSendsWithoutBufferWait(t *testing.T) {
	t.Run("64 KiB", func(t *testing.T) { sendMoreThanBuffers(t, 64<<10, 128+16) })
	t.Run("4 KiB", func(t *testing.T) { sendMoreThanBuffers(t, 4<<10, 512+128+16) })
}

// sendMoreThanBuffers sends messages of size bytes, of which early end before their receives.
func sendMoreThanBuffers(t *testing.T, size uint64, early int) {
	many := early + 56
	n := onOneGPU(t, true, 14<<20)
	n.buffers(t)
	want := random(t, size*uint64(many))
	n.from.write(0, want)
	var sends []*client.Operation
	for i := range uint64(many) {
		send, err := n.sending.Send(n.from.Memory, i*size, size, client.Buffered())
		if err != nil {
			t.Fatal(err)
		}
		sends = append(sends, send)
	}
	if _, err := wait(t, sends[early-1], nil); err != nil {
		t.Fatal(err)
	}
	if slices.ContainsFunc(sends[early:], func(op *client.Operation) bool { return endsWithin(op, 0) }) {
		t.Error("a send without a buffer ended before its delivery")
	}
	for i := range uint64(many) {
		receive, err := n.receiving.Receive(n.to.Memory, i*size, size)
		if _, err := wait(t, receive, err); err != nil {
			t.Fatal(err)
		}
	}
	for _, send := range sends {
		if moved, err := wait(t, send, nil); err != nil || moved != size {
			t.Fatal(moved, err)
		}
	}
	if !bytes.Equal(n.to.read(0, size*uint64(many)), want) {
		t.Error("messages arrived wrong")
	}
	if report := n.sender.Report(); report.Sent < size*uint64(many) || report.Sent > size*uint64(many)+1000 {
		t.Errorf("%d bytes are counted as sent, of %d", report.Sent, size*uint64(many))
	}
}

// A failure after the end of a buffered send is the next flush's: a receive that is too small, and
// the end of the receiver.
func TestBufferedSendFailureIsReportedByFlush(t *testing.T) {
	n := onOneGPU(t, true, 2<<20)
	n.buffers(t)
	post := func() {
		t.Helper()
		send, err := n.sending.Send(n.from.Memory, 0, 4096, client.Buffered())
		if _, err := wait(t, send, err); err != nil {
			t.Fatal(err)
		}
	}
	flush := func() error {
		t.Helper()
		op, err := n.sending.Flush()
		_, err = wait(t, op, err)
		return err
	}
	post()
	if _, err := n.receiving.Receive(n.to.Memory, 0, 4095); err != nil {
		t.Fatal(err)
	}
	demand(t, flush(), wire.StatusTruncated)
	if err := flush(); err != nil {
		t.Error("a failure was reported twice:", err)
	}
	post()
	if err := n.from.Memory.Unexport(within(t)); err != nil { // no message needs the memory
		t.Error("the memory of an ended send cannot be withdrawn:", err)
	}
	op, err := n.sending.Flush()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.b.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = wait(t, op, err)
	demand(t, err, wire.StatusPeerClosed)
}

// A buffered send that is canceled before its copy ends is canceled; if the result is success, its
// message arrives.
func TestCanceledBufferedSendReportsTheMessagesEnd(t *testing.T) {
	const size = 1 << 20
	n := onOneGPU(t, true, 2<<20)
	n.buffers(t)
	for range 100 {
		send, err := n.sending.Send(n.from.Memory, 0, size, client.Buffered())
		if err == nil {
			err = send.Cancel()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := wait(t, send, nil); err != nil {
			demand(t, err, wire.StatusCanceled)
			continue
		}
		receive, err := n.receiving.Receive(n.to.Memory, 0, size)
		if moved, err := wait(t, receive, err); err != nil || moved != size {
			t.Fatalf("the message of a send that succeeded: %d of %d bytes: %v", moved, size, err)
		}
	}
}
