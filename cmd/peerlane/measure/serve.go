package measure

import (
	"encoding/json"
	"errors"
	"io"
)

type answer struct {
	Result
	Error string `json:"error,omitempty"`
}

// Serve executes Jobs from in and writes Results to out, both as JSON, until the end of in. One
// process serves a whole run, because its contexts take time and memory.
func Serve(in io.Reader, out io.Writer) error {
	jobs, answers := json.NewDecoder(in), json.NewEncoder(out)
	var c *copies
	for {
		var j Job
		err := jobs.Decode(&j)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var a answer
		if c == nil {
			c, err = newCopies()
		}
		if err == nil {
			a.Result, err = c.Do(j)
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := answers.Encode(a); err != nil {
			return err
		}
	}
}

// Ask sends a Job to the process that runs Serve, and returns the Result.
func Ask(to io.Writer, from *json.Decoder, j Job) (Result, error) {
	var a answer
	if err := json.NewEncoder(to).Encode(j); err != nil {
		return a.Result, err
	}
	if err := from.Decode(&a); err != nil {
		return a.Result, err
	}
	if a.Error != "" {
		return a.Result, errors.New(a.Error)
	}
	return a.Result, nil
}
