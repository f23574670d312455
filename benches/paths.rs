//! The hot paths one by one, each as often as it is told, for `benches/instructions` to count the
//! instructions of. Nothing is timed here.
//!
//! `cargo bench --bench paths -- NAME TIMES`, or `-- --names`, or `-- --test`

mod common;

use common::paths::{NAMES, Subjects};
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (names, times) = match args[..] {
        ["--names"] => {
            NAMES.iter().for_each(|name| println!("{name}"));
            return ExitCode::SUCCESS;
        }
        ["--test"] => (NAMES.to_vec(), 100),
        [name, times] if NAMES.contains(&name) && times.parse::<u32>().is_ok() => {
            (vec![name], times.parse().unwrap_or_default())
        }
        _ => {
            eprintln!("usage: paths NAME TIMES | --names | --test");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new().expect("a store in memory and a valid configuration");
    for name in names {
        subjects.run(name, times);
    }
    ExitCode::SUCCESS
}
