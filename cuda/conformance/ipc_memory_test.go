package conformance

import (
	"errors"
	"testing"

	"github.com/peerlane/peerlane/cuda"
)

func init() {
	children["opener"] = opener
}

// opener opens memory of cuMemAlloc by handle, twice, verifies pattern 60, and writes pattern 61.
func opener(p *peer) error {
	if err := p.open(0); err != nil {
		return err
	}
	m, _, err := p.receive()
	if err != nil {
		return err
	}
	handle := cuda.IPCMemHandle(m.Bytes)
	at, err := p.d.IPCOpenMemHandle(handle)
	if err != nil {
		var refusal message
		refusal.fail(err)
		return p.send(refusal)
	}
	again, err := p.d.IPCOpenMemHandle(handle)
	if err != nil {
		return err
	}
	if again != at {
		return errors.New("two opens returned two addresses")
	}
	base, n, err := p.d.MemAddressRange(at + 8)
	if err != nil {
		return err
	}
	device, err := p.d.PointerDevice(at)
	if err != nil {
		return err
	}
	// Close one reference: the other keeps the mapping.
	if err := errors.Join(p.d.IPCCloseMemHandle(at), verify(p.d, at, size, 60), write(p.d, at, size, 61),
		p.d.IPCCloseMemHandle(at)); err != nil {
		return err
	}
	if err := p.d.IPCCloseMemHandle(at); err == nil {
		return errors.New("a third close succeeded")
	}
	return p.send(message{Numbers: []uint64{uint64(at - base), n, uint64(device)}})
}

func TestIPCMemoryHandleSharesMemory(t *testing.T) {
	use(t, 0)
	m, err := driver.MemAlloc(size)
	check(t, err)
	defer func() { check(t, driver.MemFree(m)) }()
	check(t, write(driver, m, size, 60))
	handle, err := driver.IPCGetMemHandle(m)
	check(t, err)
	if again, err := driver.IPCGetMemHandle(m); err != nil || again != handle {
		t.Errorf("another handle for the same memory, %v", err)
	}
	if _, err := driver.IPCOpenMemHandle(handle); err == nil {
		t.Error("a process opened its own memory")
	}
	p := child(t, "opener", nil)
	p.mustSend(t, message{Bytes: handle[:]})
	got, _, err := p.receive()
	check(t, err)
	if got.Error != "" {
		t.Fatalf("the driver does not let two processes of one user share it: %s", got.Error)
	}
	// On the driver a small allocation can share a larger block; this allocation is a whole block.
	if got.Numbers[0] != 0 || got.Numbers[1] < size || got.Numbers[2] != 0 {
		t.Errorf("address is %d bytes into a range of %d bytes on device %d", got.Numbers[0], got.Numbers[1], got.Numbers[2])
	}
	check(t, verify(driver, m, size, 61))
}

func TestIPCHandleOfUnsuitableMemoryIsRefused(t *testing.T) {
	use(t, 0)
	m := deviceMemory(t, 0, size, 0)
	_, err := driver.IPCGetMemHandle(m.p)
	refused(t, "an IPC handle of a VMM allocation", err, cuda.ErrInvalidValue, cuda.ErrNotSupported, cuda.ErrInvalidHandle)
	p := child(t, "opener", nil)
	p.mustSend(t, message{Bytes: make([]byte, 64)})
	got, _, err := p.receive()
	check(t, err)
	if got.Error == "" {
		t.Error("64 zeros opened a memory")
	}
	// The range of an address.
	base, n, err := driver.MemAddressRange(m.p + 4096)
	if err != nil || base != m.p || n != size {
		t.Errorf("mapping at %v of %d bytes: address range of %d bytes at %v, %v", m.p, size, n, base, err)
	}
}
