//! Processes that play a part of a check: the test program, begun again, at the other end of a socket.
//!
//! # Safety
//! A descriptor that arrives is nobody else's. A process that has played its part ends at once. Fabric handles that a
//! value points at are never given back.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, recvmsg, sendmsg,
    setsockopt, shutdown, socketpair, sockopt::ReceiveTimeout,
};
use nix::sys::time::TimeVal;

use super::parse::{sections, step, words};
use super::run::{Answer, Driver, Event, Setting};
use super::scene::Scene;
use super::value::{Kind, Value};

/// Names the part that a process plays.
const PART: &str = "CUVMM_CONFORMANCE_PART";
/// Names the devices that a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// How long another process may take for one step.
const STEP: Duration = Duration::from_secs(20);
/// The most that a packet holds.
const PACKET: usize = 4096;
/// What another process says once it has a value.
const SET: &str = "set";

/// The descriptors that a check has open, by number.
pub(crate) type Files = HashMap<RawFd, OwnedFd>;

/// A process that plays a part. It is killed when dropped.
pub(crate) struct OtherProcess {
    child: Mutex<Child>,
    socket: OwnedFd,
}

/// What is said at once, with the descriptor that goes with it.
pub(crate) struct Packet {
    pub(crate) text: String,
    pub(crate) file: Option<OwnedFd>,
}

/// Starts a process for `part` in that setting.
pub(crate) fn start(setting: &Setting, part: &str) -> io::Result<OtherProcess> {
    let (socket, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).map_err(io::Error::from)?;
    let visible = setting.visible.map_or("-".to_owned(), |device| device.to_string());
    let imex = if setting.imex { "imex" } else { "-" };
    let part = format!("{} {} {imex} {visible} {part}", setting.driver.name(), setting.devices);
    let child = Command::new(std::env::current_exe()?)
        .args(["--exact", &setting.test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(PART, part)
        .env(VISIBLE, visible_devices(setting, std::env::var(VISIBLE).ok()))
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .spawn()?;
    Ok(OtherProcess { child: Mutex::new(child), socket })
}

/// The devices that a process in that setting sees, of those that this one sees.
fn visible_devices(setting: &Setting, seen: Option<String>) -> String {
    let seen = seen.filter(|seen| !seen.is_empty()).unwrap_or_else(|| "0,1,2,3,4,5,6,7".to_owned());
    let mut devices: Vec<&str> = seen.split(',').take(setting.devices).collect();
    if let Some(device) = setting.visible {
        devices = devices.get(device).copied().into_iter().collect();
    }
    devices.join(",")
}

impl OtherProcess {
    /// Does a step there.
    pub(crate) fn execute(&self, text: &str) -> Result<Answer, String> {
        let Some(packet) = self.exchange(&format!("do {text}"), None)? else {
            return Ok(Answer::of(self.end()));
        };
        match packet.text.split_once(' ') {
            Some(("violation", text)) => Ok(Answer { text: text.to_owned(), violation: true }),
            Some(("clean", text)) => Ok(Answer::of(text.to_owned())),
            _ => Err(format!("in the other process: {}", packet.text)),
        }
    }

    /// Gives it a value as the variable `name`; a descriptor is one of `files`.
    pub(crate) fn give(&self, name: &str, value: Value, files: &Files) -> Result<(), String> {
        let (text, file) = wrap(value, files)?;
        let reply = self.exchange(&format!("set {name} {text}"), file)?.ok_or("the other process is gone")?;
        if reply.text == SET { Ok(()) } else { Err(format!("in the other process: {}", reply.text)) }
    }

    /// Takes the value of its variable `name`.
    pub(crate) fn take(&self, name: &str, scene: &Scene) -> Result<Value, String> {
        let reply = self.exchange(&format!("get {name}"), None)?.ok_or("the other process is gone")?;
        unwrap(&reply.text.clone(), reply.file, scene)
    }

    fn exchange(&self, text: &str, file: Option<BorrowedFd<'_>>) -> Result<Option<Packet>, String> {
        if send(self.socket.as_fd(), text, file).is_err() {
            return Ok(None);
        }
        self.receive(Instant::now() + STEP).or_else(|error| match error {
            Errno::EAGAIN => {
                self.kill();
                Ok(Some(Packet { text: "clean hang".to_owned(), file: None }))
            }
            _ => Err(error.to_string()),
        })
    }

    /// What it says next; none when it has ended.
    pub(crate) fn receive(&self, deadline: Instant) -> Result<Option<Packet>, Errno> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let left = TimeVal::new(left.as_secs() as i64, i64::from(left.subsec_micros()));
        setsockopt(&self.socket, ReceiveTimeout, &left)?;
        match receive(self.socket.as_fd()) {
            Err(Errno::ECONNRESET) => Ok(None),
            received => received,
        }
    }

    /// How it ended, after it said its last.
    pub(crate) fn end(&self) -> String {
        match self.child.lock().unwrap().wait() {
            Ok(status) if status.signal().is_some() => "crash".to_owned(),
            Ok(status) => format!("it ended early: {status}"),
            Err(error) => error.to_string(),
        }
    }

    /// Lets it end by itself, and waits for that.
    pub(crate) fn finish(&self) -> Result<(), String> {
        shutdown(self.socket.as_raw_fd(), Shutdown::Both).map_err(|error| error.to_string())?;
        let status = self.child.lock().unwrap().wait().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("the other process ended with {status}")) }
    }

    /// Kills it, and waits for its end.
    pub(crate) fn kill(&self) {
        let mut child = self.child.lock().unwrap();
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A value in words, and the descriptor that goes with it, which is one of `files`.
fn wrap(value: Value, files: &Files) -> Result<(String, Option<BorrowedFd<'_>>), String> {
    match value.kind {
        Kind::Gate => Err("a gate stays in its process".to_owned()),
        Kind::Number => Ok((format!("number {}", value.bits), None)),
        Kind::File => {
            let number = value.bits as RawFd;
            let file = files.get(&number).ok_or_else(|| format!("the descriptor {number} was closed"))?;
            Ok(("file".to_owned(), Some(file.as_fd())))
        }
        Kind::Fabric => {
            let handle = std::ptr::with_exposed_provenance::<[u8; 64]>(value.bits as usize);
            // SAFETY: values of this kind point at handles that are never given back.
            let bytes = unsafe { handle.read() };
            Ok((format!("fabric {}", bytes.map(|byte| format!("{byte:02x}")).concat()), None))
        }
    }
}

fn unwrap(text: &str, file: Option<OwnedFd>, scene: &Scene) -> Result<Value, String> {
    match (text.split_once(' ').unwrap_or((text, "")), file) {
        (("file", _), Some(file)) => Ok(Value { bits: scene.keep(file) as u64, kind: Kind::File }),
        (("number", digits), _) => digits.parse().map(Value::number).map_err(|_| format!("not a number: {digits}")),
        (("fabric", digits), _) => {
            let mut bytes = [0; 64];
            for (index, byte) in bytes.iter_mut().enumerate() {
                let pair = digits.get(2 * index..2 * index + 2).ok_or("too short for a fabric handle")?;
                *byte = u8::from_str_radix(pair, 16).map_err(|error| error.to_string())?;
            }
            Ok(fabric(bytes))
        }
        _ => Err(text.to_owned()),
    }
}

/// The value of a fabric handle, which is never given back.
pub(crate) fn fabric(bytes: [u8; 64]) -> Value {
    let handle: *mut [u8; 64] = Box::leak(Box::new(bytes));
    Value { bits: handle.expose_provenance() as u64, kind: Kind::Fabric }
}

/// Plays the part that this process was started for, and ends it; returns in a process that was started for none.
/// Every test begins with it.
pub fn play_part() {
    let Ok(part) = std::env::var(PART) else { return };
    // The process that asks may end first, by being killed.
    let _ = set_pdeathsig(Signal::SIGKILL);
    // A crash is an answer, of which nobody wants the memory.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let socket = io::stdin().as_fd().try_clone_to_owned().expect("a socket at standard input");
    if let Err(error) = play(&part, socket.as_fd()) {
        let _ = send(socket.as_fd(), &Event::Broken(usize::MAX, error).to_text(), None);
    }
    // SAFETY: nothing is to run at the end: what a driver does then is no part of the check.
    unsafe { nix::libc::_exit(0) }
}

fn play(part: &str, socket: BorrowedFd<'_>) -> Result<(), String> {
    let words = words(part)?;
    let [driver, devices, imex, visible, part @ ..] = &words[..] else { return Err(format!("no part: {part}")) };
    let driver = Driver::of_name(driver).ok_or("no such driver")?;
    let devices = devices.parse().map_err(|_| "not a number of devices")?;
    let test = std::env::args().nth(2).unwrap_or_default();
    let setting = Setting { driver, devices, imex: imex == "imex", visible: visible.parse().ok(), test };
    let scene = Scene::new(setting, matches!(part, [kind] if kind == "process"))?;
    match part {
        [kind, name] if kind == "check" => {
            let mut checks = sections()?.into_iter().flat_map(|section| section.checks);
            let check = checks.find(|check| check.name == *name).ok_or("no such check")?;
            scene.ask(&check, &mut |event| {
                // Who asks may be gone by then.
                let _ = send(socket, &event.to_text(), None);
            });
            Ok(())
        }
        [kind] if kind == "process" => {
            scene.start()?;
            serve(&scene, socket)
        }
        _ => Err("no such part".to_owned()),
    }
}

/// Does what it is told until nobody tells it any more.
fn serve(scene: &Arc<Scene>, socket: BorrowedFd<'_>) -> Result<(), String> {
    while let Some(packet) = receive(socket).map_err(|error| error.to_string())? {
        let (order, rest) = packet.text.split_once(' ').unwrap_or((&packet.text, ""));
        let said = match order {
            "do" => do_step(scene, rest).map(|text| send(socket, &text, None)),
            "set" => set(scene, rest, packet.file).map(|()| send(socket, SET, None)),
            "get" => send_value(scene, rest, socket),
            _ => Err(format!("no such order: {order}")),
        };
        let sent = said.unwrap_or_else(|error| send(socket, &format!("broken: {error}"), None));
        sent.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Sends a value; whether it was sent, or why there is none.
fn send_value(scene: &Scene, name: &str, socket: BorrowedFd<'_>) -> Result<Result<(), Errno>, String> {
    let value = scene.evaluate(name)?;
    let files = scene.files.lock().unwrap();
    let (text, file) = wrap(value, &files)?;
    Ok(send(socket, &text, file))
}

fn do_step(scene: &Arc<Scene>, text: &str) -> Result<String, String> {
    let before = scene.violations();
    let answer = scene.execute(&step(&words(text)?)?)?;
    let violation = answer.violation || scene.violations() > before;
    Ok(format!("{} {}", if violation { "violation" } else { "clean" }, answer.text))
}

fn set(scene: &Scene, rest: &str, file: Option<OwnedFd>) -> Result<(), String> {
    let (name, value) = rest.split_once(' ').ok_or("no value")?;
    let value = unwrap(value, file, scene)?;
    scene.variables.lock().unwrap().insert(name.to_owned(), value);
    Ok(())
}

fn send(socket: BorrowedFd<'_>, text: &str, file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let bytes = &text.as_bytes()[..text.len().min(PACKET)];
    let files: Vec<RawFd> = file.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&files)];
    let control = if files.is_empty() { &rights[..0] } else { &rights[..] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None).map(drop)
}

fn receive(socket: BorrowedFd<'_>) -> Result<Option<Packet>, Errno> {
    let mut bytes = [0; PACKET];
    let mut control = nix::cmsg_space!(RawFd);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let message = loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut pieces, Some(&mut control), MsgFlags::MSG_CMSG_CLOEXEC) {
            Err(Errno::EINTR) => {}
            received => break received?,
        }
    };
    let mut file = None;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(files) = control {
            // SAFETY: it came with this message, and nobody else knows its number.
            file = files.first().map(|&number| unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
    let length = message.bytes;
    if length == 0 {
        return Ok(None);
    }
    Ok(Some(Packet { text: String::from_utf8_lossy(&bytes[..length]).into_owned(), file }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_seen_by_what_names_them_here() {
        let check = |devices, visible, seen: Option<&str>, expect: &str| {
            let setting = Setting { driver: Driver::Gpu, devices, imex: false, visible, test: String::new() };
            assert_eq!(visible_devices(&setting, seen.map(str::to_owned)), expect);
        };
        check(1, None, None, "0");
        check(2, None, None, "0,1");
        check(2, Some(1), None, "1");
        check(1, None, Some("3,2"), "3");
        check(2, Some(1), Some("GPU-a,GPU-b,GPU-c"), "GPU-b");
        check(1, None, Some(""), "0");
    }

    #[test]
    fn a_descriptor_that_was_closed_is_not_sent() {
        let closed = Value { bits: 900, kind: Kind::File };
        assert_eq!(wrap(closed, &Files::new()).unwrap_err(), "the descriptor 900 was closed");
    }

    #[test]
    fn a_value_that_another_process_cannot_take_is_told() {
        let (socket, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let other = OtherProcess { child: Mutex::new(Command::new("true").spawn().unwrap()), socket };
        let give = || other.give("x", Value::number(1), &Files::new());
        for (reply, expect) in [(SET, Ok(())), ("broken: no value", Err("in the other process: broken: no value"))] {
            send(theirs.as_fd(), reply, None).unwrap();
            assert_eq!(give(), expect.map_err(str::to_owned));
        }
        drop(theirs);
        assert_eq!(give(), Err("the other process is gone".to_owned()));
    }
}
