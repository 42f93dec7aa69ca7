// The goroutines that green.py measures beside green threads: `green commstime N` and `green parked N`.
package main

import (
	"fmt"
	"os"
	"strconv"
	"time"
)

func commstime(n int) {
	a, b, c, d := make(chan int), make(chan int), make(chan int), make(chan int)
	go func() { // prefix
		a <- 0
		for {
			a <- <-c
		}
	}()
	go func() { // delta
		for {
			x := <-a
			b <- x
			d <- x
		}
	}()
	go func() { // successor
		for {
			c <- <-b + 1
		}
	}()
	for i := 0; i < 100; i++ {
		<-d
	}
	began := time.Now()
	for i := 0; i < n; i++ {
		<-d
	}
	fmt.Printf("{\"us\": %f}\n", time.Since(began).Seconds()/float64(n)*1e6)
}

func resident() int {
	text, _ := os.ReadFile("/proc/self/statm")
	var size, pages int
	fmt.Sscan(string(text), &size, &pages)
	return pages * os.Getpagesize()
}

func parked(n int) {
	gate, there, answers := make(chan int), make(chan int, 1024), make(chan int)
	before := resident()
	for i := 0; i < n; i++ {
		go func() {
			there <- 1
			<-gate
			answers <- 1
		}()
	}
	for i := 0; i < n; i++ {
		<-there
	}
	bytes := float64(resident()-before) / float64(n)
	began := time.Now()
	close(gate)
	for i := 0; i < n; i++ {
		<-answers
	}
	seconds := time.Since(began).Seconds()
	fmt.Printf("{\"bytes\": %f, \"answer_us\": %f}\n", bytes, seconds/float64(n)*1e6)
}

func main() {
	n, _ := strconv.Atoi(os.Args[2])
	map[string]func(int){"commstime": commstime, "parked": parked}[os.Args[1]](n)
}
