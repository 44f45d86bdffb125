package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// monitor is QEMU's QMP connection, with one command at a time.
// https://www.qemu.org/docs/master/interop/qmp-spec.html
type monitor struct {
	mu   sync.Mutex
	conn net.Conn
	dec  *json.Decoder
}

// monitorTimeout bounds an answer of QEMU itself, which no guest can delay.
const monitorTimeout = 30 * time.Second

func dialMonitor(path string) (*monitor, error) {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return nil, fmt.Errorf("QEMU's monitor: %w", err)
	}
	m := &monitor{conn: conn, dec: json.NewDecoder(conn)}
	var greeting json.RawMessage
	err = conn.SetDeadline(time.Now().Add(monitorTimeout))
	if err == nil {
		err = m.dec.Decode(&greeting)
	}
	if err == nil {
		err = m.do("qmp_capabilities", nil)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("QEMU's monitor: %w", err), conn.Close())
	}
	return m, nil
}

func (m *monitor) do(command string, arguments any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.conn.SetDeadline(time.Now().Add(monitorTimeout)); err != nil {
		return err
	}
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	if err := json.NewEncoder(m.conn).Encode(request); err != nil {
		return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
	}
	for {
		var answer struct {
			Return *json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := m.dec.Decode(&answer); err != nil {
			return fmt.Errorf("QEMU's monitor: %s: %w", command, err)
		}
		switch {
		case answer.Error != nil:
			return fmt.Errorf("QEMU's monitor: %s: %s", command, answer.Error.Desc)
		case answer.Return != nil:
			return nil
		} // else an event
	}
}

func (m *monitor) Close() error { return m.conn.Close() }
