//! The doctor as a person and as a program meet it: text, JSON, and the code that it ends with.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

use std::collections::BTreeSet;
use std::process::{Command, Output, Stdio};

use cuvmm::Driver;
use serde_json::Value;

const DOCUMENT: [&str; 6] = ["driver", "format", "sections", "subject", "summary", "works"];
const SECTION: [&str; 3] = ["id", "rows", "title"];
const ROW: [&str; 10] = ["answer", "call", "calls", "code", "cure", "detail", "id", "name", "title", "value"];
/// What is tried out on each device.
const PROBES: [&str; 7] = ["memory", "copies", "posix_fd", "fabric", "rdma", "compression", "dma_buf"];

fn doctor(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command.arg("doctor").args(arguments).stdin(Stdio::null());
    command.env_remove("RUST_BACKTRACE").env_remove("RUST_LIB_BACKTRACE");
    command
}

/// Runs it to its end; its code and what it printed, all on standard output.
#[track_caller]
fn run(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!(String::from_utf8(stderr).unwrap(), "");
    (status.code(), String::from_utf8(stdout).unwrap())
}

#[track_caller]
fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// A JSON document of the documented shape.
#[track_caller]
fn document(text: &str) -> Value {
    let document: Value = serde_json::from_str(text).unwrap();
    assert_eq!(keys(&document), DOCUMENT);
    assert_eq!(document["format"], 1);
    let mut ids = BTreeSet::new();
    for section in document["sections"].as_array().unwrap() {
        assert_eq!(keys(section), SECTION);
        for row in section["rows"].as_array().unwrap() {
            assert_eq!(keys(row), ROW, "{row}");
            assert!(ids.insert((section["id"].as_str().unwrap(), row["id"].as_str().unwrap())), "twice: {row}");
            let answer = row["answer"].as_str().unwrap();
            assert!(["yes", "no", "fact", "warning"].contains(&answer), "{row}");
            assert!(answer == "no" || (row["call"].is_null() && row["code"].is_null()), "{row}");
            assert!(answer != "warning" || row["cure"].is_string(), "{row}");
            assert!(!row["detail"].as_str().unwrap().is_empty(), "{row}");
        }
    }
    document
}

#[track_caller]
fn row<'a>(document: &'a Value, section: &str, id: &str) -> &'a Value {
    let found = |list: &'a Value, id: &str| list.as_array().unwrap().iter().find(|item| item["id"] == id);
    let section = found(&document["sections"], section).unwrap_or_else(|| panic!("no section {section}"));
    found(&section["rows"], id).unwrap_or_else(|| panic!("no row {id} in {section}"))
}

#[test]
fn on_the_simulator_it_says_so_first_and_sums_up_last() {
    let (code, text) = run(&mut doctor(&["--driver", "sim", "--machine", "h200_pair"]));
    assert_eq!(code, Some(0), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("simulated machine `h200_pair`") && lines[0].contains("no GPU is used"), "{}", lines[0]);
    assert!(lines.last().unwrap().starts_with("virtual memory works on 2 of 2 devices; "), "{text}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("device ")).count(), 2, "{text}");
    assert!(lines.iter().all(|line| line.chars().count() <= 120 && line.trim_end() == *line), "{text}");
}

#[test]
fn json_has_the_documented_shape_and_every_probe() {
    let (code, text) = run(&mut doctor(&["--driver", "sim", "--machine", "h200_pair", "--json"]));
    assert_eq!(code, Some(0));
    let found = document(&text);
    assert_eq!((&found["driver"], &found["works"]), (&Value::from("sim"), &Value::from(true)));
    for (device, peer) in [("device0", "peer_1"), ("device1", "peer_0")] {
        for id in PROBES.iter().chain(&[peer]) {
            let row = row(&found, device, id);
            assert!(["yes", "no"].contains(&row["answer"].as_str().unwrap()), "{row}");
            assert!(!row["calls"].as_array().unwrap().is_empty(), "it was tried: {row}");
        }
        for id in ["memory", "copies", "posix_fd", "rdma", "compression", peer] {
            assert_eq!(row(&found, device, id)["answer"], "yes", "{id}");
        }
    }
    let size = &row(&found, "device0", "granularity_posix_fd")["value"];
    assert_eq!((size["minimum"].as_u64(), size["recommended"].as_u64()), (Some(2 << 20), Some(2 << 20)));
    assert_eq!(row(&found, "driver", "reservation")["value"], 1_u64 << 46);
    assert_eq!(row(&found, "host_memory", "host_node_0")["answer"], "yes");
    assert_eq!(row(&found, "after", "left_behind")["value"], 0);
    assert!(row(&found, "host", "open_files")["value"]["soft"].is_u64(), "its limit is a number here");
}

/// The simulated H200 has no IMEX channel, as the real one that was measured.
#[test]
fn a_no_names_the_call_that_said_so_its_code_and_a_cure() {
    let (_, text) = run(&mut doctor(&["--driver", "sim", "--json"]));
    let found = document(&text);
    let fabric = row(&found, "device0", "fabric");
    assert_eq!((&fabric["answer"], &fabric["call"]), (&Value::from("no"), &Value::from("cuMemCreate")));
    assert_eq!((&fabric["code"], &fabric["name"]), (&Value::from(800), &Value::from("CUDA_ERROR_NOT_PERMITTED")));
    assert!(fabric["cure"].as_str().unwrap().contains("IMEX"), "{fabric}");
    let (_, text) = run(&mut doctor(&["--driver", "sim"]));
    assert!(text.contains("cuMemCreate failed with 800 (CUDA_ERROR_NOT_PERMITTED)"), "{text}");
    assert!(text.contains("> no IMEX channel"), "{text}");
}

/// The odd machine lacks much, has granularities that differ, and a NUMA node without memory.
#[test]
fn what_is_missing_on_an_odd_machine_is_told_device_by_device() {
    let (code, text) = run(&mut doctor(&["--driver", "sim", "--machine", "odd", "--json"]));
    let found = document(&text);
    assert_eq!((code, &found["works"]), (Some(0), &Value::from(true)), "{}", found["summary"]);
    let answers = |section: &str, ids: &[&str], expect: &str| {
        for id in ids {
            let row = row(&found, section, id);
            assert_eq!(row["answer"], expect, "{section}: {row}");
            assert!(expect == "yes" || (row["call"].is_string() && row["cure"].is_string()), "{row}");
        }
    };
    for device in ["device0", "device1", "device2"] {
        answers(device, &["memory", "copies", "posix_fd", "fabric"], "yes");
        answers(device, &["rdma", "compression", "dma_buf"], "no");
        let least = |kind: &str| row(&found, device, &format!("granularity_{kind}"))["value"]["minimum"].as_u64();
        assert_eq!([least("plain"), least("posix_fd"), least("fabric")], [1 << 20, 2 << 20, 32 << 20].map(Some));
    }
    answers("device0", &["peer_1"], "yes");
    answers("device0", &["peer_2"], "no");
    answers("device2", &["peer_0", "peer_1"], "no");
    answers("host_memory", &["host_node_1"], "yes");
    answers("host_memory", &["host_node_3"], "no");
    assert_eq!(row(&found, "after", "left_behind")["value"], 0);
}

/// Text and JSON are of one model, so what one has, the other has.
#[test]
fn text_has_a_line_for_each_row_of_json() {
    let (_, text) = run(&mut doctor(&["--driver", "sim", "--machine", "small"]));
    let (_, json) = run(&mut doctor(&["--driver", "sim", "--machine", "small", "--json"]));
    for section in document(&json)["sections"].as_array().unwrap() {
        assert!(text.lines().any(|line| line == section["title"]), "{section}");
        for row in section["rows"].as_array().unwrap() {
            let title = format!("  {} ", row["title"].as_str().unwrap());
            assert!(text.lines().any(|line| line.starts_with(&title)), "{row}");
        }
    }
}

/// Whatever it finds there, and never the simulator in a GPU's place.
#[test]
fn a_machine_is_examined_with_a_gpu_or_without() {
    let works = Driver::load().is_ok_and(|driver| driver.device_count() > 0);
    for arguments in [&["--json"][..], &["--driver", "auto", "--json"], &["--driver", "cuda", "--json"]] {
        let (code, text) = run(&mut doctor(arguments));
        let found = document(&text);
        assert_eq!(found["driver"], "cuda");
        assert_eq!(code, Some(if found["works"] == true { 0 } else { 1 }));
        if works {
            assert!(row(&found, "driver", "library")["value"].as_str().unwrap().contains("libcuda"));
            assert_eq!(row(&found, "after", "left_behind")["value"], 0);
        } else {
            assert_eq!(row(&found, "driver", "start")["answer"], "no");
            assert_eq!(found["works"], false);
        }
    }
}

/// With a GPU, too: the first library that the loader finds is none. (On WSL the driver would be found elsewhere.)
#[test]
fn without_a_driver_it_says_what_was_looked_for_and_what_cures_it() {
    let folder = std::env::temp_dir().join(format!("cuvmm-doctor-cli-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libcuda.so.1"), "no library").unwrap();
    let (code, text) = run(doctor(&[]).env("LD_LIBRARY_PATH", &folder));
    let (_, json) = run(doctor(&["--json"]).env("LD_LIBRARY_PATH", &folder));
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(code, Some(1), "{text}");
    let found = document(&json);
    let start = row(&found, "driver", "start");
    assert_eq!((&start["answer"], &start["call"]), (&Value::from("no"), &Value::Null));
    for word in ["libcuda.so.1", "LD_LIBRARY_PATH", "/usr/lib/wsl/lib", folder.to_str().unwrap()] {
        assert!(start["detail"].as_str().unwrap().contains(word), "{word}: {start}");
    }
    assert!(start["cure"].as_str().unwrap().contains("install NVIDIA's driver"), "{start}");
    assert!(text.lines().last().unwrap().starts_with("no device could be examined; "), "{text}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    for arguments in [
        &["--machine", "small"][..],
        &["--machine", "small", "--driver", "cuda"],
        &["--driver", "sim", "--machine", "large"],
        &["--driver", "gpu"],
        &["--text"],
    ] {
        let Output { status, stdout, stderr } = doctor(arguments).output().unwrap();
        assert_eq!((status.code(), stdout.len()), (Some(2), 0), "{arguments:?}");
        let message = String::from_utf8(stderr).unwrap();
        assert!(message.starts_with("cuvmm: ") && message.contains("--help"), "{arguments:?}: {message}");
    }
}
