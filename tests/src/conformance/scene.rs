//! [`Scene`]: all that one check has, and how its steps are done where it says.
//!
//! # Safety
//! Host functions and destructors own what they are given, and run once. A forked child makes one step and ends.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, RawDriver, Served, Table};
use cuvmm_sim::{Machine, Simulator};
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork, pipe2};

use super::commands;
use super::parse::{Check, Step};
use super::part::{Files, OtherProcess};
use super::run::{Answer, Event, Setting};
use super::value::{Value, evaluate};

/// How long a gate holds a stream up that nobody opens.
pub(crate) const GATE: Duration = Duration::from_secs(10);
/// How long a host function or a destructor may be waited for: longer than for a gate.
const START: Duration = Duration::from_secs(12);
/// How long a forked child may take.
const CHILD: Duration = Duration::from_secs(10);
/// The size of the host buffer, of which only what is touched takes memory.
pub(crate) const HOST_BUFFER: usize = 64 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// What one check has: a driver of its own, variables, threads, other processes.
pub(crate) struct Scene {
    pub(crate) setting: Setting,
    /// Whether a check that is asked elsewhere started this process.
    pub(crate) is_other_process: bool,
    pub(crate) driver: Box<dyn RawDriver>,
    pub(crate) variables: Mutex<HashMap<String, Value>>,
    /// The descriptors that the check has open.
    pub(crate) files: Mutex<Files>,
    pub(crate) gates: Mutex<Vec<Arc<Gate>>>,
    /// Whether the destructor of a user object ran.
    pub(crate) fired: Mutex<HashMap<usize, Arc<AtomicBool>>>,
    /// The test kernels by name, once they are loaded.
    pub(crate) kernels: Mutex<HashMap<&'static str, CUfunction>>,
    pub(crate) processes: Mutex<HashMap<String, Arc<OtherProcess>>>,
    simulator: Option<Simulator>,
    threads: Mutex<HashMap<String, Sender<Job>>>,
}

/// A driver whose entry points a simulator names: checks ask whether there are any, and call none.
struct AnyOther;

impl Served for AnyOther {
    fn served() -> &'static dyn RawDriver {
        static OTHER: LazyLock<Simulator> = LazyLock::new(|| Simulator::new(Machine::h200()));
        &*OTHER
    }
}

/// What holds a stream up.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Scene {
    /// A driver that nobody started yet, and nothing else.
    pub(crate) fn new(setting: Setting, is_other_process: bool) -> Result<Arc<Self>, String> {
        let simulator = setting.machine().map(Simulator::new);
        let driver: Box<dyn RawDriver> = match &simulator {
            Some(simulator) => {
                simulator.serve::<AnyOther>();
                Box::new(simulator.clone())
            }
            None => Box::new(Table::load().map_err(|error| format!("no driver: {error}"))?),
        };
        Ok(Arc::new(Self {
            setting,
            is_other_process,
            driver,
            simulator,
            variables: Mutex::default(),
            files: Mutex::default(),
            gates: Mutex::default(),
            fired: Mutex::default(),
            kernels: Mutex::default(),
            processes: Mutex::default(),
            threads: Mutex::default(),
        }))
    }

    /// Calls cuInit.
    pub(crate) fn start(&self) -> Result<(), String> {
        // SAFETY: cuInit takes a number.
        let code = unsafe { self.driver.cuInit(0) };
        if code.is_success() { Ok(()) } else { Err(format!("cuInit answered {code}")) }
    }

    /// Asks a whole check, and tells of each step.
    pub(crate) fn ask(self: &Arc<Self>, check: &Check, tell: &mut dyn FnMut(Event)) {
        if !check.is_cold
            && let Err(error) = self.start()
        {
            return tell(Event::Broken(0, error));
        }
        for (index, line) in check.lines.iter().enumerate() {
            tell(Event::At(index));
            let before = self.violations();
            let answer = match self.execute(&line.step) {
                Ok(answer) => answer,
                Err(error) => return tell(Event::Broken(index, error)),
            };
            let violation = answer.violation || self.violations() > before;
            if line.expected.is_some() {
                tell(Event::Answer(index, Answer { text: answer.text, violation }));
            } else if !answer.is_success() {
                return tell(Event::Broken(index, format!("set-up answered {}", answer.text)));
            }
        }
        tell(Event::End);
    }

    pub(crate) fn is_simulated(&self) -> bool {
        self.simulator.is_some()
    }

    pub(crate) fn violations(&self) -> usize {
        self.simulator.as_ref().map_or(0, |simulator| simulator.violations().len())
    }

    pub(crate) fn evaluate(&self, text: &str) -> Result<Value, String> {
        let mut variables = self.variables.lock().unwrap();
        if text.starts_with("host") && !variables.contains_key("host") {
            // It is never given back: work may still be queued on it when the check ends.
            let buffer = vec![0_u8; HOST_BUFFER].leak();
            variables.insert("host".to_owned(), Value::number(buffer.as_mut_ptr().addr() as u64));
            // Its address is used as a number, and made a pointer again by the commands that copy.
            let _ = buffer.as_mut_ptr().expose_provenance();
        }
        evaluate(text, &variables)
    }

    /// Does a step where it says, and waits for its answer.
    pub(crate) fn execute(self: &Arc<Self>, step: &Step) -> Result<Answer, String> {
        match step {
            Step::Command(command) => commands::execute(self, command),
            Step::OnThread(thread, step) => self.on_thread(thread, step),
            Step::InProcess(process, text) => self.process(process)?.execute(text),
            Step::InFork(step) => self.in_fork(step),
            Step::InHostFunction(stream, step) => {
                let stream = CUstream(std::ptr::with_exposed_provenance_mut(self.evaluate(stream)?.bits as usize));
                // SAFETY: the function owns what it is given.
                self.in_callback(step, |data| unsafe { self.driver.cuLaunchHostFunc(stream, Some(call_back), data) })
            }
            Step::InDestructor(step) => self.in_callback(step, |data| {
                let mut object = CUuserObject::NULL;
                // SAFETY: the output is ours, and the destructor owns what it is given.
                let code = unsafe { self.driver.cuUserObjectCreate(&raw mut object, data, Some(call_back), 1, 1) };
                if !code.is_success() {
                    return code;
                }
                // SAFETY: the reference is ours, and given back once.
                unsafe { self.driver.cuUserObjectRelease(object, 1) }
            }),
        }
    }

    pub(crate) fn process(&self, name: &str) -> Result<Arc<OtherProcess>, String> {
        self.processes.lock().unwrap().get(name).cloned().ok_or_else(|| format!("no process {name} was started"))
    }

    fn on_thread(self: &Arc<Self>, name: &str, step: &Step) -> Result<Answer, String> {
        let (answers, answer) = channel();
        let (scene, step) = (Arc::clone(self), step.clone());
        let job: Job = Box::new(move || drop(answers.send(scene.execute(&step))));
        let mut threads = self.threads.lock().unwrap();
        let jobs = threads.entry(name.to_owned()).or_insert_with(|| {
            let (sender, receiver) = channel::<Job>();
            // It ends with its sender, so with the scene.
            std::thread::spawn(move || receiver.into_iter().for_each(|job| job()));
            sender
        });
        let sent = jobs.send(job);
        drop(threads);
        sent.ok().and_then(|()| answer.recv().ok()).unwrap_or_else(|| Err(format!("the thread {name} ended")))
    }

    fn in_callback(
        self: &Arc<Self>,
        step: &Step,
        queue: impl FnOnce(*mut c_void) -> CUresult,
    ) -> Result<Answer, String> {
        let (starts, start) = channel();
        let (answers, answer) = channel();
        let (scene, step) = (Arc::clone(self), step.clone());
        let job: Job = Box::new(move || {
            let _ = starts.send(());
            let _ = answers.send(scene.execute(&step));
        });
        let data = Box::into_raw(Box::new(job)).cast::<c_void>();
        let code = queue(data);
        if !code.is_success() {
            return Ok(Answer::of(format!("not queued {}", code.0)));
        }
        match start.recv_timeout(START) {
            Ok(()) => answer.recv().unwrap_or_else(|_| Err("a callback that ended early".into())),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(Answer::of("never".into())),
        }
    }

    fn in_fork(self: &Arc<Self>, step: &Step) -> Result<Answer, String> {
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC).map_err(|error| format!("no pipe: {error}"))?;
        // SAFETY: the child makes one step, in which nothing takes a lock that another thread can have held, writes
        // its answer, and ends without unwinding.
        match unsafe { fork() }.map_err(|error| format!("no child: {error}"))? {
            ForkResult::Child => {
                let text = match self.execute(step) {
                    Ok(answer) => format!("answer {}", answer.text),
                    Err(error) => format!("broken {error}"),
                };
                let _ = nix::unistd::write(&writer, text.as_bytes());
                // SAFETY: nothing of the parent's is to run at the end of the child.
                unsafe { nix::libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                // A child that ended without a word is not to be waited for.
                drop(writer);
                let deadline = Instant::now() + CHILD;
                loop {
                    match waitpid(child, Some(WaitPidFlag::WNOHANG)) {
                        Ok(WaitStatus::Exited(..)) => break,
                        Ok(WaitStatus::Signaled(..)) => return Ok(Answer::of("crash".into())),
                        Ok(_) if Instant::now() > deadline => {
                            let _ = kill(child, Signal::SIGKILL);
                            let _ = waitpid(child, None);
                            return Ok(Answer::of("hang".into()));
                        }
                        Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                        Err(error) => return Err(format!("a child that is lost: {error}")),
                    }
                }
                let mut bytes = [0; 4096];
                // It has ended, so that all is there.
                let read = nix::unistd::read(&reader, &mut bytes).map_err(|error| error.to_string())?;
                let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
                match text.split_once(' ') {
                    Some(("answer", text)) => Ok(Answer::of(text.to_owned())),
                    _ => Err(format!("in the child: {text}")),
                }
            }
        }
    }

    /// Keeps a descriptor that the check has open now, and gives its number.
    pub(crate) fn keep(&self, file: OwnedFd) -> i32 {
        let number = file.as_raw_fd();
        self.files.lock().unwrap().insert(number, file);
        number
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for gate in self.gates.get_mut().unwrap().iter() {
            gate.open();
        }
    }
}

impl Gate {
    /// Puts a gate into a stream.
    pub(crate) fn close(driver: &dyn RawDriver, stream: CUstream, longest: Duration) -> Result<Arc<Self>, CUresult> {
        let gate = Arc::new(Self::default());
        let waiting = Arc::clone(&gate);
        let job: Job = Box::new(move || waiting.wait(longest));
        let data = Box::into_raw(Box::new(job)).cast::<c_void>();
        // SAFETY: the function owns what it is given.
        let code = unsafe { driver.cuLaunchHostFunc(stream, Some(call_back), data) };
        if code.is_success() { Ok(gate) } else { Err(code) }
    }

    pub(crate) fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn wait(&self, longest: Duration) {
        let guard = self.is_open.lock().unwrap();
        drop(self.opened.wait_timeout_while(guard, longest, |is_open| !*is_open).unwrap());
    }
}

/// A function that runs a job that it is given, and is to be given each job once. One that never runs is lost.
pub(crate) unsafe extern "C" fn call_back(data: *mut c_void) {
    // SAFETY: the data is a job, made for this one call.
    let job = unsafe { Box::from_raw(data.cast::<Job>()) };
    job();
}

/// A function that does nothing.
pub(crate) unsafe extern "C" fn nothing(_: *mut c_void) {}

/// A function that sets the flag that it is given a share of.
pub(crate) unsafe extern "C" fn fire(data: *mut c_void) {
    // SAFETY: the data is a share of a flag, made for this one call.
    let flag = unsafe { Arc::from_raw(data.cast::<AtomicBool>()) };
    flag.store(true, std::sync::atomic::Ordering::SeqCst);
}
