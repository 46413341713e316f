//! `process-life BACKEND LOAD END`: a process that ends with something left, for the suite `process_life`; one whose load
//! ends it has the end `itself`. `process-life list` names all loads, and the ends that each may have.
//!
//! It says `ready` right before its end, which is to be with code 0 and without another word.
#![deny(unsafe_code)]
// This program is part of tests: what it did not expect is to end it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ends;
mod life;
mod loads;

use std::process::exit;
use std::thread;

use crate::life::{Life, say_ready};

const ENDS: &str = "return exit exit-elsewhere";
const ITSELF: &str = "itself";

fn main() {
    life::limit();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["list"] => list(),
        [backend, load, ITSELF] => ends::named(load)(backend),
        [backend, load, end] => end_with(backend, loads::named(load), end),
        _ => panic!("process-life BACKEND LOAD END"),
    }
}

fn list() {
    loads::ALL.iter().for_each(|(name, _)| println!("{name} {ENDS}"));
    ends::ALL.iter().for_each(|(name, _)| println!("{name} {ITSELF}"));
}

fn end_with(backend: &str, load: loads::Load, end: &str) {
    life::watch_for_late_calls();
    let life = Life::begin(backend);
    let last = load(&life);
    // The end is to find all that there is.
    std::mem::forget(life);
    match end {
        "return" => {
            last();
            say_ready();
        }
        "exit" => {
            last();
            say_ready();
            exit(0);
        }
        "exit-elsewhere" => {
            let elsewhere = thread::spawn(|| {
                last();
                say_ready();
                exit(0)
            });
            elsewhere.join().unwrap();
        }
        _ => panic!("no such end: {end}"),
    }
}
