package measure

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Sockets is a number of threads, and a number of sockets per thread, to which the thread writes
// in turn (NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD).
type Sockets struct {
	Threads int `json:"threads"`
	Each    int `json:"each"`
}

func (s Sockets) String() string { return fmt.Sprintf("%d × %d", s.Threads, s.Each) }

// Count returns the total number of sockets.
func (s Sockets) Count() int { return s.Threads * s.Each }

// socketPiece is the size of a write or a read in bytes.
const socketPiece = 1 << 20

// warmUp returns the first part of a stream's duration, which does not count.
func warmUp(d time.Duration) time.Duration { return d / 10 }

// Send writes for a duration, whose first tenth is the warm-up, and then closes its side of the
// connections. to has Count connections, and every connection gets at least one write, even if the
// threads start so late that the time is over.
func (s Sockets) Send(to []*net.TCPConn, d time.Duration) error {
	piece := make([]byte, socketPiece)
	failed := make([]error, s.Threads)
	end := time.Now().Add(d + warmUp(d))
	var threads sync.WaitGroup
	for i := range s.Threads {
		own := to[i*s.Each : (i+1)*s.Each]
		threads.Go(func() {
			for {
				for _, c := range own {
					if _, err := c.Write(piece); err != nil {
						failed[i] = err
						return
					}
				}
				if time.Now().After(end) {
					break
				}
			}
			for _, c := range own {
				failed[i] = errors.Join(failed[i], c.CloseWrite())
			}
		})
	}
	threads.Wait()
	return errors.Join(failed...)
}

// ReceiveAll reads the bytes of Send until the end of every connection, and returns the rate in
// GB/s after the warm-up of a stream of that duration. If no bytes arrive after the warm-up, it
// returns the rate of the whole stream.
func ReceiveAll(from []*net.TCPConn, d time.Duration) (gbs float64, err error) {
	var first time.Time
	var begin sync.Once
	var all, counted atomic.Int64
	failed := make([]error, len(from))
	var threads sync.WaitGroup
	for i, c := range from {
		threads.Go(func() {
			piece := make([]byte, socketPiece)
			for {
				n, err := c.Read(piece)
				if errors.Is(err, io.EOF) {
					return
				}
				if err != nil {
					failed[i] = err
					return
				}
				begin.Do(func() { first = time.Now() })
				all.Add(int64(n))
				if time.Since(first) >= warmUp(d) {
					counted.Add(int64(n))
				}
			}
		})
	}
	threads.Wait()
	if err := errors.Join(failed...); err != nil {
		return 0, err
	}
	if all.Load() == 0 {
		return 0, errors.New("plain sockets: nothing came")
	}
	took := time.Since(first)
	if counted.Load() == 0 {
		return float64(all.Load()) / took.Seconds() / 1e9, nil
	}
	return float64(counted.Load()) / (took - warmUp(d)).Seconds() / 1e9, nil
}

// AskSocket sends messages of one size for a duration, each after the answer of one byte to the
// message before, and returns the time of every message. AskSocket closes the sending side of the
// connection.
func AskSocket(c *net.TCPConn, size uint64, d time.Duration) (times []time.Duration, err error) {
	message, word := make([]byte, size), make([]byte, 1)
	begin := time.Now()
	for end := begin.Add(d + warmUp(d)); ; {
		start := time.Now()
		if _, err = c.Write(message); err == nil {
			_, err = io.ReadFull(c, word)
		}
		if err != nil {
			return nil, err
		}
		now := time.Now()
		if now.Sub(begin) >= warmUp(d) && len(times) < keptTimes {
			times = append(times, now.Sub(start))
		}
		if now.After(end) {
			return times, c.CloseWrite()
		}
	}
}

// AnswerSocket answers the messages of AskSocket until the end of the connection.
func AnswerSocket(c *net.TCPConn, size uint64) error {
	message := make([]byte, size)
	for {
		_, err := io.ReadFull(c, message)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			_, err = c.Write(message[:1])
		}
		if err != nil {
			return err
		}
	}
}
