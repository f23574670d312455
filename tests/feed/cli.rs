//! The command.

use crate::sockets::{Dir, LONG, Process, until};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn heatsink(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_heatsink"));
    command.env("HEATSINK_DIR", dir).args(args).output().unwrap()
}

fn text(out: &Output) -> String {
    String::from_utf8(out.stdout.clone()).unwrap()
}

#[test]
fn an_operator_lists_explains_pins_denies_and_watches() {
    let dir = Dir::new();
    let process = Process::start(&dir.0);
    until(LONG, "it serves", || process.leads());
    let mut watch = Command::new(env!("CARGO_BIN_EXE_heatsink"))
        .args(["--dir", dir.0.to_str().unwrap(), "watch", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut changes = BufReader::new(watch.stdout.take().unwrap()).lines();
    assert_eq!(text(&heatsink(&dir.0, &["pin", "launch"])), "pinned\n");
    let seen = changes.any(|line| line.unwrap().contains("\"launch\""));
    assert!(seen, "watch tells it");
    let list = heatsink(&dir.0, &["list", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list["entries"][0]["key"], "launch");
    assert_eq!(list["entries"][0]["treatment"], "near cache");
    assert!(text(&heatsink(&dir.0, &["explain", "launch"])).contains("pinned by an operator"));
    assert_eq!(text(&heatsink(&dir.0, &["deny", "launch"])), "denied\n");
    assert_eq!(text(&heatsink(&dir.0, &["allow", "launch"])), "allowed\n");
    assert_eq!(text(&heatsink(&dir.0, &["unpin", "launch"])), "unpinned\n");
    assert_eq!(text(&heatsink(&dir.0, &["unpin", "launch"])), "was not pinned\n");
    let set = ["override", "launch", "near", "--ttl", "200ms", "--lasts", "6h"];
    assert_eq!(text(&heatsink(&dir.0, &set)), "set\n");
    let told = text(&heatsink(&dir.0, &["explain", "launch"]));
    for decided in ["pinned by", "denied by", "denial taken back", "values for 200 ms"] {
        assert!(told.contains(decided), "each decision of the last hour: {told}");
    }
    watch.kill().unwrap();
    watch.wait().unwrap();
}

/// In a terminal of its own, which Python's standard library can make.
#[test]
fn the_live_view_shows_the_list_and_ends_on_q() {
    let dir = Dir::new();
    let process = Process::start(&dir.0);
    until(LONG, "it serves", || process.leads());
    assert!(heatsink(&dir.0, &["pin", "launch"]).status.success());
    let script = "import os, pty, select, struct, sys, termios, time, fcntl\n\
        pid, fd = pty.fork()\n\
        if pid == 0: os.execv(sys.argv[1], sys.argv[1:])\n\
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 100, 0, 0))\n\
        out, end = b'', time.time() + 10\n\
        while not (b'launch' in out and b'saved/s' in out) and time.time() < end:\n\
        \x20   if select.select([fd], [], [], 0.1)[0]: out += os.read(fd, 65536)\n\
        os.write(fd, b'q')\n\
        print('launch' if b'launch' in out else out)\n\
        while True:\n\
        \x20   try:\n\
        \x20       if not os.read(fd, 65536): break\n\
        \x20   except OSError: break\n\
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))";
    let bin = env!("CARGO_BIN_EXE_heatsink");
    let out = Command::new("python3")
        .args(["-c", script, bin, "--dir", dir.0.to_str().unwrap(), "top"])
        .output()
        .unwrap();
    assert_eq!(text(&out), "launch\n0\n", "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn errors_say_what_is_wrong() {
    let dir = Dir::new();
    std::fs::create_dir(&dir.0).unwrap();
    let told = |args: &[&str], dir: &Path, code: i32| {
        let out = heatsink(dir, args);
        assert_eq!(out.status.code(), Some(code), "{args:?}");
        assert!(out.stdout.is_empty());
        String::from_utf8(out.stderr).unwrap()
    };
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&dir.0, std::fs::Permissions::from_mode(0o700)).unwrap();
    for command in ["list", "top", "watch"] {
        assert!(told(&[command], &dir.0, 1).contains("nobody serves a feed in"));
    }
    assert!(told(&["list"], &dir.0.join("no"), 1).contains("cannot be looked at"));
    assert!(told(&["lsit"], &dir.0, 2).contains("unknown command: lsit"));
    assert!(told(&["pin"], &dir.0, 2).contains("pin of what?"));
    assert!(told(&["override", "k", "salt"], &dir.0, 2).contains("override needs"));
    assert!(told(&["pin", "k", "--lasts", "5"], &dir.0, 2).contains("--lasts needs a time"));
    let known = dir.0.join("known");
    std::fs::write(&known, "{\"key\":\"a\"}\n{\"prefix\":\"m:\",\"form\":1}").unwrap();
    let known = known.to_str().unwrap();
    assert!(told(&["check", known], &dir.0, 1).contains("line 2: unknown field `form`"));
    std::fs::write(known, "{\"key\":\"a\"}\n{\"prefix\":\"m:\",\"from\":1}").unwrap();
    assert!(text(&heatsink(&dir.0, &["check", known])).ends_with("1 keys, 1 prefixes\n"));
}
