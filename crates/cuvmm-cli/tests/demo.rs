//! The command as a person meets it: what it prints where, and the code that it ends with.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use cuvmm::Driver;

/// How it went.
struct Run {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// The command with these arguments, in the user's own environment but for what would add to its messages.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuvmm"));
    command.args(arguments).env_remove("RUST_BACKTRACE").env_remove("RUST_LIB_BACKTRACE").stdin(Stdio::null());
    command
}

/// Runs it to its end, without a panic.
#[track_caller]
fn end(command: &mut Command) -> Run {
    let output = command.output().unwrap();
    let run = Run {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    };
    let all = format!("{}{}", run.stdout, run.stderr);
    assert!(!all.contains("panicked") && !all.contains("RUST_BACKTRACE"), "{all}");
    run
}

#[track_caller]
fn run(arguments: &[&str]) -> Run {
    end(&mut command(arguments))
}

impl Run {
    /// Demands the table of a demo that went well.
    #[track_caller]
    fn require_table(&self) {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        let lines: Vec<&str> = self.stdout.lines().collect();
        // Behind the driver, and where it is the simulator for want of a GPU, the reason.
        let head = lines.iter().take(3).find(|line| line.starts_with("step")).copied().unwrap_or_default();
        for column in ["step", "outcome", "address", "chunks", "bytes", "time"] {
            assert!(head.contains(column), "no {column} in {head:?}");
        }
        let rows = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
        assert!(rows("in place") == 1 && rows("moved") == 1, "{}", self.stdout);
        // Here, there, and here what was written there.
        assert_eq!(rows("verified"), 3, "{}", self.stdout);
        assert!(rows("other process") >= 3, "{}", self.stdout);
        assert_eq!(lines.last(), Some(&"nothing is left behind"));
    }

    /// Demands one message that begins with the command's name, on standard error alone, and gives all that is there.
    #[track_caller]
    fn require_message(&self, code: i32) -> &str {
        assert_eq!((self.code, self.stdout.as_str()), (Some(code), ""), "{}", self.stderr);
        let messages = self.stderr.lines().filter(|line| line.starts_with("cuvmm: ")).count();
        assert!(messages == 1 && self.stderr.starts_with("cuvmm: "), "{:?}", self.stderr);
        &self.stderr
    }
}

/// Whether there is a GPU that this process can use.
fn has_gpu() -> bool {
    Driver::load().is_ok_and(|driver| driver.device(0).is_ok())
}

#[test]
fn on_the_simulator_the_demo_ends_well_and_says_what_it_ran_on() {
    let run = run(&["demo", "--driver", "sim"]);
    run.require_table();
    let first = run.stdout.lines().next().unwrap();
    assert!(first.contains("the simulated driver") && first.contains("no GPU is used"), "{first}");
}

/// Also beside others of its kind: nothing of a demo is anybody else's.
#[test]
fn demos_run_side_by_side() {
    std::thread::scope(|scope| {
        let runs = [(); 2].map(|()| scope.spawn(|| run(&["demo", "--driver", "sim"])));
        runs.into_iter().for_each(|run| run.join().unwrap().require_table());
    });
}

#[test]
fn on_a_gpu_the_demo_ends_well_and_without_one_it_says_what_to_do() {
    let run = run(&["demo", "--driver", "cuda"]);
    if has_gpu() {
        run.require_table();
        assert!(run.stdout.lines().next().unwrap().contains("CUDA driver"), "{}", run.stdout);
        return;
    }
    let message = run.require_message(1);
    let lines: Vec<&str> = message.lines().collect();
    let [_, advice] = lines[..] else { panic!("a message and an advice: {message:?}") };
    assert!(advice.contains("--driver sim"), "{advice:?}");
    assert!(lines[0].contains("driver"), "{message:?}");
}

/// The simulator is never taken for a GPU, and never in silence.
#[test]
fn where_nothing_is_chosen_the_demo_says_why_it_runs_on_what_it_does() {
    let run = run(&["demo"]);
    run.require_table();
    let head: Vec<&str> = run.stdout.lines().take(2).collect();
    let (line, told) = if has_gpu() { (0, "CUDA driver") } else { (1, "there is no GPU here") };
    assert!(head[line].contains(told), "{head:?}");
}

#[test]
fn what_is_not_understood_is_told_with_where_to_look() {
    for arguments in [
        &["demo", "--driver", "gpu"][..],
        &["demo", "--driver"],
        &["demo", "--gpu"],
        &["demo", "sim"],
        &["demo-peer"],
        &["demo-peer", "--driver", "SIM"],
        &["show"],
        &[],
    ] {
        let run = run(arguments);
        let message = run.require_message(2);
        assert!(message.contains("--help"), "{arguments:?}: {message}");
    }
    let unknown = run(&["demo", "--driver", "gpu"]);
    assert!(["`gpu`", "auto", "cuda", "sim"].iter().all(|word| unknown.stderr.contains(word)), "{}", unknown.stderr);
}

#[test]
fn help_is_asked_for_and_so_no_failure() {
    for arguments in [&["--help"][..], &["-h"], &["demo", "--help"]] {
        let run = run(arguments);
        assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(run.stdout.contains("--driver") || run.stdout.contains("demo"), "{}", run.stdout);
    }
}

/// A pipe that nobody reads, as behind `| head`.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn output_that_nobody_reads_ends_in_a_message() {
    for arguments in [&["--help"][..], &["demo", "--help"]] {
        end(command(arguments).stdout(unread()));
    }
    let run = end(command(&["demo", "--driver", "sim"]).stdout(unread()));
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("standard output"), "{}", run.stderr);
}

#[test]
fn output_that_nobody_reads_on_ends_in_a_message() {
    // The second process runs from the fifth line on.
    for lines in [1, 4, 5, 7] {
        let mut child =
            command(&["demo", "--driver", "sim"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::with_capacity(1, child.stdout.take().unwrap());
        let mut line = String::new();
        for _ in 0..lines {
            assert!(stdout.read_line(&mut line).unwrap() > 0, "{line}");
        }
        drop(stdout);
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.contains("panicked"), "{stderr}");
        // It may have written all before the pipe was closed.
        let told = if output.status.success() { stderr.is_empty() } else { stderr.contains("standard output") };
        assert!(told, "{}: {stderr}", output.status);
    }
}

#[test]
fn a_full_disk_ends_in_a_message() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let run = end(command(&["demo", "--driver", "sim"]).stdout(full));
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("standard output") && run.stderr.contains("space"), "{}", run.stderr);
}

#[test]
fn messages_that_nobody_reads_change_no_code() {
    for (arguments, code) in [(&["demo", "--driver", "sim"][..], 0), (&["demo", "--driver", "gpu"], 2), (&[], 2)] {
        let run = end(command(arguments).stderr(unread()));
        assert_eq!(run.code, Some(code), "{arguments:?}");
    }
    let run = end(command(&["demo", "--driver", "sim"]).stdout(unread()).stderr(unread()));
    assert_eq!(run.code, Some(1));
}

/// The second process without the first: nothing, a pipe, and sockets on which nothing, or nonsense, comes.
#[test]
fn the_second_process_alone_says_what_it_lacks() {
    let peer = || command(&["demo-peer", "--driver", "sim"]);
    let silent = |bytes: &[u8]| {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut ours, bytes).unwrap();
        Stdio::from(OwnedFd::from(theirs))
    };
    for (what, stdin) in [
        ("nothing", Stdio::null()),
        ("a pipe", std::io::pipe().unwrap().0.into()),
        ("a socket that is closed", silent(&[])),
        ("a socket with nonsense", silent(&[b'?'; 4096])),
    ] {
        let run = end(peer().stdin(stdin));
        let message = run.require_message(1);
        assert!(message.contains("receive a buffer"), "{what}: {message}");
        assert!(message.contains("standard input"), "{what}: {message}");
    }
}
