package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/relay/packet"
	"github.com/peerlane/peerlane/relay/wire"
)

// Staging is staging memory to be made.
type Staging struct {
	Bytes uint64
	// GPU names the lane of the memory, and the GPU whose streams copy.
	GPU wire.UUID
	// Access is wire.AccessSend, wire.AccessReceive or both; 0 is both.
	Access uint32
}

// Staging has the relay make memory on a server GPU of a lane, and maps the memory here, so that
// this process copies: into the memory, and then sends from the memory, After a timeline that the
// stream writes after the copy (StreamTimelines.Write); or receives into the memory, and the stream
// waits for the receive's Signal before the copy out. On route staged the relay makes no further
// copy: the NIC reads and writes the memory in place. A copy into the memory before the end of a
// send may change the sent bytes.
//
// The container needs peerlane.dev/gpu= of that GPU: importing memory takes the server GPU's device
// node. No context on the server GPU is made. The memory is Bytes long, or more where the driver's
// granularity asks for it, and not zeros. The memory counts for the relay's limits
// (relay.limits.client_staging, relay.limits.staging) and for the host's limit (staging.limit)
// until Unexport or the session's end.
func (s *Session) Staging(ctx context.Context, d *cuda.Driver, a Staging) (*Memory, error) {
	if a.Access == 0 {
		a.Access = wire.AccessSend | wire.AccessReceive
	}
	device, err := deviceOf(d, a.GPU)
	if err != nil {
		return nil, err
	}
	answer, fds, err := s.exchange(ctx, &wire.Staging{Bytes: a.Bytes, GPU: a.GPU, Access: a.Access})
	if err != nil {
		return nil, err
	}
	defer packet.CloseAll(fds)
	made, ok := answer.(*wire.StagingMade)
	if !ok || len(fds) != 1 || made.Bytes < a.Bytes {
		return nil, wire.Errorf(
			wire.StatusMalformed,
			"the relay answered for staging memory with a %T and %d descriptors",
			answer,
			len(fds),
		)
	}
	ptr, unmap, err := mapStaging(d, fds[0], made.Bytes, device)
	if err != nil {
		s.release(made)
		return nil, fmt.Errorf("staging memory on server GPU %d (%s): %w", made.Index, made.Server.GPU(), err)
	}
	return s.keep(&Memory{
		session: s, number: made.Memory, Bytes: made.Bytes, Ptr: ptr, Server: made.Server, ServerIndex: int(made.Index),
		unmap: unmap,
	})
}

// deviceOf finds a GPU among those that CUDA shows here.
func deviceOf(d *cuda.Driver, gpu wire.UUID) (cuda.Device, error) {
	n, err := d.DeviceCount()
	if err != nil {
		return 0, err
	}
	for i := range n {
		device, err := d.DeviceGet(i)
		if err != nil {
			return 0, err
		}
		uuid, err := d.DeviceUUID(device)
		if err != nil {
			return 0, err
		}
		if id, err := wire.ParseGPU(uuid); err == nil && id == gpu {
			return device, nil
		}
	}
	return 0, wire.Errorf(
		wire.StatusWrongGPU,
		"CUDA does not show %s to this process, whose streams are to copy",
		gpu.GPU(),
	)
}

// mapStaging imports memory and gives a single device access. The import does not use the server
// device, which CUDA_VISIBLE_DEVICES may hide.
func mapStaging(
	d *cuda.Driver,
	fd int,
	bytes uint64,
	device cuda.Device,
) (ptr cuda.Ptr, release func() error, err error) {
	handle, err := d.MemImportFD(fd)
	if errors.Is(err, cuda.ErrInvalidDevice) {
		err = fmt.Errorf(
			"%w: that GPU's device node is not in this container; start it with --device peerlane.dev/gpu=N, where N is "+
				"the client GPU's number on the host",
			err,
		)
	}
	if err != nil {
		return 0, nil, fmt.Errorf("importing it: %w", err)
	}
	// The mapping keeps the memory, and goes where there is an error.
	defer func() {
		released := d.MemRelease(handle)
		if released != nil && err == nil {
			released = errors.Join(released, release())
		}
		err = errors.Join(err, released)
	}()
	if ptr, err = d.MemAddressReserve(bytes, 0); err != nil {
		return 0, nil, fmt.Errorf("reserving %d bytes of addresses: %w", bytes, err)
	}
	if err = d.MemMap(ptr, bytes, 0, handle); err != nil {
		return 0, nil, errors.Join(fmt.Errorf("mapping it: %w", err), d.MemAddressFree(ptr, bytes))
	}
	release = func() error { return errors.Join(d.MemUnmap(ptr, bytes), d.MemAddressFree(ptr, bytes)) }
	if err = d.MemSetAccess(ptr, bytes, cuda.Access{Device: device, Write: true}); err != nil {
		return 0, nil, errors.Join(
			fmt.Errorf("access for this process's GPU (is there a peer-to-peer path between the two?): %w", err),
			release(),
		)
	}
	return ptr, release, nil
}
