package topo

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode"
)

// CheckText refuses a host with a control character in a text from the devices: a terminal
// would execute a control sequence.
func (h *Host) CheckText() error {
	devices := *h
	devices.Source, devices.Notes = Source{}, nil // Peerlane's own texts, and the user's
	return checkText(reflect.ValueOf(devices), "")
}

// TextError reports a text with a control character.
type TextError struct {
	Field string // of a Host, such as "NICs[0].Name"
	Text  string
}

func (e *TextError) Error() string {
	return fmt.Sprintf("%s is %.80s: it contains a control character", e.Field, strconv.QuoteToASCII(e.Text))
}

func checkText(v reflect.Value, where string) error {
	switch v.Kind() {
	case reflect.String:
		if strings.ContainsFunc(v.String(), unicode.IsControl) {
			return &TextError{strings.TrimPrefix(where, "."), v.String()}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if err := checkText(v.Field(i), where+"."+v.Type().Field(i).Name); err != nil {
				return err
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if err := checkText(v.Index(i), where+"["+strconv.Itoa(i)+"]"); err != nil {
				return err
			}
		}
	case reflect.Pointer:
		if !v.IsNil() {
			return checkText(v.Elem(), where)
		}
	case reflect.Map:
		for each := v.MapRange(); each.Next(); {
			if err := checkText(each.Key(), where); err != nil {
				return err
			}
			if err := checkText(each.Value(), where); err != nil {
				return err
			}
		}
	}
	return nil
}
