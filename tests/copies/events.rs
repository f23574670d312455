//! What happens next: one event at a time, drawn from the seed.

use super::*;

/// One run: what has happened, or what was wrong.
pub(crate) fn run(seed: u64, profile: Profile) -> Result<Counts, String> {
    let mut world = World::new(seed, profile);
    for _ in 0..profile.steps {
        world.event();
        if world.wrong.is_some() {
            break;
        }
    }
    if world.wrong.is_none() {
        world.rest();
    }
    world.counts.trace ^= world.now;
    match world.wrong {
        None => Ok(world.counts),
        Some(wrong) => Err(format!("seed {seed}: {wrong}\n{profile:?}")),
    }
}

impl World {
    fn event(&mut self) {
        let kind = self.draw(100);
        match kind {
            0..=4 if self.profile.still && self.draw(40) > 0 => {}
            0..=4 => {
                let p = self.draw(PROCESSES as u64) as usize;
                let mine = self.writers.iter().filter(|w| !w.repair && !w.returned).count();
                if mine < self.profile.writers && !self.ends {
                    self.start_writer(p);
                }
            }
            5..=14 if self.profile.quiet && self.draw(10) > 0 => {}
            5..=14 => {
                let p = self.draw(PROCESSES as u64) as usize;
                let mine = self.readers.iter().filter(|r| r.process == p).count();
                if mine < self.profile.readers && !self.ends {
                    self.start_reader(p);
                }
            }
            15..=17 => self.keep_lease(),
            18..=19 => self.coordinate(),
            20 if self.broken(Mutant::ShortTtl) => {
                let draw = self.rng.next_u64();
                self.store.evict(draw);
            }
            20..=21 => self.mischief(),
            22..=26 => self.pass_time(1),
            27 if self.profile.jumps && self.draw(3) == 0 => {
                let jump = 1 + self.draw(40);
                self.pass_time(jump);
            }
            28 if self.draw(2) == 0 => self.drop_late(),
            _ => self.move_call(),
        }
    }

    /// Applies or answers one call.
    fn move_call(&mut self) {
        if self.calls.is_empty() {
            return self.pass_time(1);
        }
        let k = self.draw(self.calls.len() as u64) as usize;
        if self.profile.slow && slow(&self.calls[k]) && self.draw(60) > 0 {
            return;
        }
        if self.calls[k].got.is_some() || self.calls[k].answered {
            return self.deliver(k);
        }
        let (write, mine) = (!self.calls[k].op.is_read(), self.calls[k].owner != Owner::Nobody);
        if self.profile.unknown && write && mine && self.draw(16) == 0 {
            return self.give_up_call(k);
        }
        self.execute(k);
        if self.calls[k].owner == Owner::Nobody {
            self.calls.swap_remove(k);
        }
    }

    fn execute(&mut self, k: usize) {
        let plan = self.plan;
        let replica = self.broken(Mutant::FromReplica) && self.draw(4) == 0;
        let (op, now) = (self.calls[k].op.clone(), self.now);
        let got = self.store.apply(&plan, &op, now, replica);
        match got {
            None => self.calls[k].answered = true,
            Some(got) => {
                if let (Op::PutCopy { .. }, Got::Kept(_)) = (&op, &got) {
                    self.dirty |= self.plan.form == Form::TtlOnly;
                }
                self.calls[k].got = Some(got);
            }
        }
    }

    /// The answer arrives, or is lost, or says that nothing was applied.
    fn deliver(&mut self, k: usize) {
        let lost = self.profile.unknown && self.draw(12) == 0;
        let call = self.calls.swap_remove(k);
        let read = call.op.is_read();
        let answer = match call.got {
            None => Answer::NotApplied,
            Some(_) if lost => Answer::Unknown,
            Some(got) => Answer::Applied(got),
        };
        let answer = if read && answer_is_unknown(&answer) { Answer::NotApplied } else { answer };
        if self.told {
            println!("{} {:?} {:?} -> {answer:?}", self.now, call.owner, call.op);
        }
        self.route(call.owner, &call.op, answer);
    }

    fn route(&mut self, owner: Owner, op: &Op, answer: Answer<Got>) {
        match owner {
            Owner::Nobody => {}
            Owner::Loader(p) => self.loaded(p, answer),
            Owner::Fill(p, generation, i) => {
                self.processes[p].filling.retain(|f| *f != (generation, i));
            }
            Owner::Reader(id) => self.reader_hears(id, answer),
            Owner::Writer(id) => self.writer_hears(id, op, answer),
        }
    }

    fn loaded(&mut self, p: usize, answer: Answer<Got>) {
        self.processes[p].loading = false;
        let Answer::Applied(Got::Record(record)) = answer else { return };
        let plan = self.plan;
        // A lease counts from when its load was sent.
        let sent = self.processes[p].load_sent;
        let until = if self.profile.life { sent + LEASE } else { u64::MAX };
        if self.now >= until {
            return;
        }
        // What lapsed before this came has lapsed.
        let _ = self.lease(p);
        let plain_until = at(self.now + OP);
        let process = &mut self.processes[p];
        process.floor.learn(&plan, record.set, plain_until);
        (process.lease, process.until, process.last) = (Some(record), until, record.set);
        let waiting: Vec<u64> = self
            .writers
            .iter_mut()
            .filter(|w| w.process == p)
            .filter_map(|w| std::mem::take(&mut w.waits_for_lease).then_some(w.id))
            .collect();
        waiting.into_iter().for_each(|id| self.drive_writer(id));
    }

    fn reader_hears(&mut self, id: u64, answer: Answer<Got>) {
        let Some(k) = self.readers.iter().position(|r| r.id == id) else { return };
        let p = self.readers[k].process;
        let (plan, now, set) = (self.plan, self.tick(), self.set(p));
        let life = self.lease(p).map_or(0, |r| r.life);
        let plain = matches!(self.readers[k].get.poll(&plan, now), read::Step::Plain);
        let (reader, floor) = (&mut self.readers[k], &mut self.processes[p].floor);
        match answer {
            Answer::Applied(Got::Copy(copy, of)) => {
                reader.copy_life = if matches!(copy, Copy::Image(_)) { of } else { 0 };
                reader.get.handle_copy(&plan, floor, (now, set), copy);
                if !matches!(reader.get.poll(&plan, now), read::Step::Done(_)) {
                    (reader.copy_life, reader.life) = (0, life);
                }
            }
            Answer::Applied(Got::Seen(Seen::Base(base))) if plain => {
                return self.end_plain(k, base);
            }
            _ if plain => drop(self.readers.swap_remove(k)),
            Answer::Applied(Got::Seen(seen)) => {
                reader.get.handle_look(&plan, floor, (now, set), seen);
            }
            _ => match reader.get.poll(&plan, now) {
                read::Step::Copy(..) => {
                    reader.get.handle_copy(&plan, floor, (now, set), Copy::Failed);
                }
                _ => reader.get.handle_look(&plan, floor, (now, set), Seen::Failed),
            },
        }
        self.drive_reader(id);
    }

    fn end_plain(&mut self, k: usize, base: Option<Bytes>) {
        let r = self.readers.swap_remove(k);
        self.check(&r, base.as_ref());
    }

    fn writer_hears(&mut self, id: u64, op: &Op, answer: Answer<Got>) {
        let Some(k) = self.writers.iter().position(|w| w.id == id) else { return };
        let (plan, now) = (self.plan, self.tick());
        let w = &mut self.writers[k];
        let number = |answer: Answer<Got>| match answer {
            Answer::Applied(Got::Cell(cell)) => Answer::Applied(cell),
            Answer::Unknown => Answer::Unknown,
            _ => Answer::NotApplied,
        };
        match op {
            Op::Base { .. } => {
                let answer = match answer {
                    Answer::Applied(Got::Base { seq, cell }) => {
                        w.own = Some(seq);
                        Answer::Applied(cell)
                    }
                    Answer::Unknown => Answer::Unknown,
                    _ => Answer::NotApplied,
                };
                w.write.handle_base(&plan, now, answer);
            }
            Op::Bump { .. } => w.write.handle_bump(&plan, now, number(answer)),
            Op::PutCopy { i, image, .. } => {
                // What was sent before the step changed is for nobody.
                if w.write.image().map(|i| i.label) == Some(image.label) {
                    w.write.handle_copy(&plan, now, *i, kept(answer));
                }
            }
            Op::EraseCopy { i, .. } => w.write.handle_copy(&plan, now, *i, kept(answer)),
            _ => {
                let seen = match answer {
                    Answer::Applied(Got::Seen(seen)) => seen,
                    _ => Seen::Failed,
                };
                w.write.handle_look(&plan, now, seen);
            }
        }
        self.drive_writer(id);
    }

    /// Time passes. Calls that have waited too long are given up, those given up are over.
    fn pass_time(&mut self, by: u64) {
        for _ in 0..by {
            self.now += 1;
            for k in (0..self.calls.len()).rev() {
                // A call that is given up may end others of its owner.
                let Some(call) = self.calls.get(k) else { continue };
                let age = self.now - call.sent;
                if call.owner == Owner::Nobody {
                    if age >= IN_FLIGHT {
                        if self.draw(2) == 0 {
                            self.execute(k);
                        }
                        self.calls.swap_remove(k);
                    }
                } else if age >= OP && !(self.profile.slow && slow(call) && unlimited(&call.op)) {
                    self.time_out(k);
                }
            }
            let due: Vec<u64> = self
                .writers
                .iter()
                .filter(|w| w.wake > 0 && self.now >= w.wake)
                .map(|w| w.id)
                .collect();
            for id in due {
                if let Some(w) = self.writers.iter_mut().find(|w| w.id == id) {
                    w.wake = 0;
                    self.drive_writer(id);
                }
            }
        }
    }

    fn time_out(&mut self, k: usize) {
        let late = self.profile.unknown && self.calls[k].got.is_none() && self.draw(3) == 0;
        if !late && self.calls[k].got.is_none() && !self.calls[k].answered {
            self.execute(k);
        }
        if late && !self.calls[k].op.is_read() {
            return self.give_up_call(k);
        }
        self.deliver(k);
    }

    /// Nobody knows, and it may still be applied.
    fn give_up_call(&mut self, k: usize) {
        let (owner, op) = (self.calls[k].owner, self.calls[k].op.clone());
        self.calls[k].owner = Owner::Nobody;
        self.route(owner, &op, Answer::Unknown);
    }

    /// A call that was given up is lost on its way.
    fn drop_late(&mut self) {
        if let Some(k) = self.calls.iter().position(|c| c.owner == Owner::Nobody) {
            self.calls.swap_remove(k);
        }
    }

    pub(super) fn abandon(&mut self, owner: Owner) {
        self.calls.retain_mut(|call| {
            let mine = call.owner == owner;
            if mine {
                call.owner = Owner::Nobody;
            }
            !(mine && (call.got.is_some() || call.answered || call.op.is_read()))
        });
    }

    fn keep_lease(&mut self) {
        let p = self.draw(PROCESSES as u64) as usize;
        if self.profile.life || self.processes[p].lease.is_none() {
            self.load(p);
        }
    }

    /// One step in the life of the set.
    fn coordinate(&mut self) {
        if !self.profile.life {
            return;
        }
        let often = if self.profile.restless { 5 } else { 30 };
        if self.draw(often) == 0 && !self.ends {
            let closes =
                !matches!(self.profile.mutant, Some(Mutant::NoRejoin | Mutant::WarmBeforeWait));
            self.want = if closes { self.draw(4) } else { 1 + self.draw(3) } as u16;
        }
        let record = self.store.record;
        if record.version != self.seen_version {
            (self.seen_version, self.record_since) = (record.version, self.now);
            self.warmed = false;
        }
        let same_names = self.broken(Mutant::SameNames) || self.broken(Mutant::SameNamesNoCell);
        let nonce = if same_names { 1 } else { self.rng.next_u64() | 1 };
        let known = life::At {
            set: record.set,
            since: super::at(self.record_since),
            warmed: self.warmed,
            now: self.tick(),
            wait: life::wait(ms(LEASE), 0),
            nonce,
        };
        match life::next(&self.plan, &known, self.want) {
            life::Step::Rest | life::Step::WaitUntil(_) => {}
            life::Step::Change(set) => {
                let new = record.set.is_none() && set.is_some();
                self.counts.lives += u64::from(new);
                if new && self.broken(Mutant::SameNamesNoCell) {
                    self.store.drop_cell(1);
                }
                self.store.change(set, new);
            }
            // The reduced forms have nothing to warm their copies with: readers fill them.
            life::Step::Warm(_) if !self.plan.form.versioned() => self.warmed = true,
            life::Step::Warm(set) => {
                if !self.warming {
                    self.warming = true;
                    self.push_writer(0, Write::repair(set), None, record.life, (true, true));
                }
            }
        }
    }

    fn mischief(&mut self) {
        if self.ends {
            return;
        }
        let draw = self.rng.next_u64();
        match self.draw(7) {
            0 if self.profile.crashes && !self.writers.is_empty() => {
                let k = (draw % self.writers.len() as u64) as usize;
                let w = self.writers.swap_remove(k);
                self.abandon(Owner::Writer(w.id));
                self.dirty = true;
                if w.warms {
                    (self.warming, self.warmed) = (false, false);
                    self.record_since = self.now;
                } else if w.repair {
                    self.processes[w.process].helping = false;
                }
            }
            1 if self.profile.foreign => {
                self.values += 1;
                let value =
                    (!draw.is_multiple_of(4) || !self.profile.deletes).then_some(self.values);
                if self.now >= self.store.down_until {
                    self.store.put_directly(self.now, value);
                    self.dirty = true;
                }
            }
            2 if self.profile.failover && self.counts.failovers == 0 && draw.is_multiple_of(2) => {
                let until = FILL + IN_FLIGHT + 1;
                if self.store.fail_over(self.now, until, draw >> 8) {
                    self.counts.failovers += 1;
                    self.void = true;
                    self.done = 0;
                    self.processes.iter_mut().for_each(|p| p.newest = 0);
                    self.readers.iter_mut().for_each(|r| (r.low, r.floor, r.base) = (0, 0, 0));
                    self.pass_time(FILL + IN_FLIGHT + 1);
                }
            }
            3 if self.profile.copy_failover => {
                self.store.lose_copy(draw);
                self.void = true;
            }
            4 if self.profile.rollback && draw.is_multiple_of(3) => self.store.roll_back(),
            5 if self.profile.give_up && !self.writers.is_empty() => {
                let k = (draw % self.writers.len() as u64) as usize;
                let (plan, now) = (self.plan, self.tick());
                let w = &mut self.writers[k];
                if !w.returned && w.own.is_some() {
                    w.write.give_up(&plan, now);
                    self.dirty = true;
                    let id = w.id;
                    self.abandon(Owner::Writer(id));
                    self.drive_writer(id);
                }
            }
            _ => {}
        }
    }

    /// No more requests. All ends; then every copy that is there holds what the base holds (b).
    fn rest(&mut self) {
        self.ends = true;
        if self.profile.life && self.profile.mutant.is_none() {
            self.want = 2;
        }
        for round in 0..40_000 {
            if self.wrong.is_some() {
                return;
            }
            let opening = self.store.record.set.is_some_and(|s| s.readers != s.writers);
            let busy = !self.calls.is_empty()
                || !self.writers.is_empty()
                || !self.readers.is_empty()
                || opening;
            if !busy {
                break;
            }
            if round == 39_999 {
                return self.fail('l', "it does not come to rest".into());
            }
            match self.draw(10) {
                0..=2 => self.pass_time(1),
                3 => self.keep_lease(),
                4 => self.coordinate(),
                _ => {
                    self.profile.slow = false;
                    self.move_call();
                }
            }
        }
        let Some(set) = self.store.record.set else { return };
        if self.void || !self.plan.form.versioned() && self.plan.form != Form::DeleteTwice {
            return;
        }
        if self.dirty && self.plan.form.versioned() && !self.broken(Mutant::NoHelper) {
            let life = self.store.record.life;
            self.push_writer(0, Write::repair(set), None, life, (true, false));
            while !self.writers.is_empty() {
                self.move_call();
            }
        } else if self.dirty && self.plan.form == Form::DeleteTwice {
            return;
        }
        let astray = self.store.astray(set, self.now);
        if !astray.is_empty() {
            self.fail('b', format!("at rest, copies {astray:?} do not hold what the base holds"));
        }
    }
}

/// What may take its time where the world is slow.
fn slow(call: &Call) -> bool {
    unlimited(&call.op) || matches!(call.owner, Owner::Fill(..))
}

/// No protocol relies on these ending in time.
fn unlimited(op: &Op) -> bool {
    matches!(op, Op::GetCopy { .. } | Op::Base { .. })
}

fn answer_is_unknown(answer: &Answer<Got>) -> bool {
    matches!(answer, Answer::Unknown)
}

fn kept(answer: Answer<Got>) -> Answer<write::Kept> {
    match answer {
        Answer::Applied(Got::Kept(kept)) => Answer::Applied(kept),
        Answer::Unknown => Answer::Unknown,
        _ => Answer::NotApplied,
    }
}
