//! What counts once per id: adds, poisons, folds; and ids that are used again, turn by turn.

use super::optional::clean;
use super::stock::all;
use super::{Cx, Seen, ok, refused, same};
use crate::ErrorKind;
use crate::store::{End, Ended, Id, Once, Store, Take};

pub(super) async fn once_counts<S: Store>(cx: Cx<S>) -> Seen {
    let (key, a, b) = (cx.key("counts"), cx.id("a"), cx.id("b"));
    for (id, amount, want) in [
        (&a, 3, Once::Applied(3)),
        (&a, 3, Once::Duplicate),
        (&b, -1, Once::Applied(2)),
        (&b, 9, Once::Duplicate),
    ] {
        same("add_once", &ok("add_once", cx.store.add_once(&key, id, amount).await)?, &want)?;
    }
    same("get", &cx.bytes(&key).await?, &Some("2".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn once_poison<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("poison"), cx.id("id"));
    for _ in 0..2 {
        let poison = ok("poison_once", cx.store.poison_once(&key, &id).await)?;
        same("poison_once", &poison, &Once::Poisoned)?;
    }
    let add = ok("add_once", cx.store.add_once(&key, &id, 1).await)?;
    same("add_once", &add, &Once::Poisoned)?;
    same("get", &cx.bytes(&key).await?, &None)
}

pub(super) async fn once_late_poison<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("late"), cx.id("id"));
    ok("add_once", cx.store.add_once(&key, &id, 1).await)?;
    let poison = ok("poison_once", cx.store.poison_once(&key, &id).await)?;
    same("poison_once", &poison, &Once::Duplicate)?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn fold_marks<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id, other) = (cx.key("fold"), cx.key("id"), cx.key("other"));
    ok("add", cx.store.add(&key, 40).await)?;
    same("folded", &ok("folded", cx.store.folded(&key, &id).await)?, &false)?;
    for now in [true, false] {
        same("fold", &ok("fold", cx.store.fold(&key, &id, 2).await)?, &now)?;
        same("folded", &ok("folded", cx.store.folded(&key, &id).await)?, &true)?;
        same("add", &ok("add", cx.store.add(&key, 0).await)?, &42)?;
    }
    same("folded", &ok("folded", cx.store.folded(&key, &other).await)?, &false)?;
    for there in [true, false] {
        same("unfold", &ok("unfold", cx.store.unfold(&key, &id).await)?, &there)?;
        same("folded", &ok("folded", cx.store.folded(&key, &id).await)?, &false)?;
    }
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn fold_race<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("foldrace"), cx.key("id"));
    let of = key.clone();
    let folds = cx
        .together(8, move |cx, _| {
            let (key, id) = (of.clone(), id.clone());
            async move { cx.store.fold(&key, &id, -5).await }
        })
        .await?;
    let folds: Result<Vec<bool>, _> = folds.into_iter().map(|fold| ok("fold", fold)).collect();
    same("folds that counted", &folds?.into_iter().filter(|counted| *counted).count(), &1)?;
    same("add", &ok("add", cx.store.add(&key, 0).await)?, &-5)?;
    ok("unfold", cx.store.unfold(&key, &cx.key("id")).await)?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn fold_refused<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("foldtext"), cx.key("id"));
    ok("put", cx.store.put(&key, "many".into(), None).await)?;
    refused("fold", cx.store.fold(&key, &id, 1).await, ErrorKind::WrongType)?;
    same("folded", &ok("folded", cx.store.folded(&key, &id).await)?, &false)?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn once_race<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("race"), cx.id("id"));
    let of = key.clone();
    let adds = cx
        .together(8, move |cx, _| {
            let (key, id) = (of.clone(), id.clone());
            async move { cx.store.add_once(&key, &id, 5).await }
        })
        .await?;
    for add in adds {
        ok("add_once", add)?;
    }
    same("get", &cx.bytes(&key).await?, &Some("5".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn once_refused<S: Store>(cx: Cx<S>) -> Seen {
    let (key, id) = (cx.key("refused"), cx.id("id"));
    ok("put", cx.store.put(&key, "hello".into(), None).await)?;
    refused("add_once", cx.store.add_once(&key, &id, 1).await, ErrorKind::WrongType)?;
    ok("put", cx.store.put(&key, "1".into(), None).await)?;
    let add = ok("add_once", cx.store.add_once(&key, &id, 1).await)?;
    same("add_once", &add, &Once::Applied(2))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn turns_of_adds<S: Store>(cx: Cx<S>) -> Seen {
    let (key, name) = (cx.key("turns"), cx.key("step"));
    let turn = |n| Id::in_turn(name.clone(), n);
    for (n, amount, want) in [
        (9, 3, Once::Applied(3)),
        (9, 3, Once::Duplicate),
        (8, 5, Once::Duplicate),
        (10, 1, Once::Applied(4)),
        (9, 3, Once::Duplicate),
        (u64::MAX, 1, Once::Applied(5)),
        (11, 7, Once::Duplicate),
    ] {
        let add = ok("add_once", cx.store.add_once(&key, &turn(n), amount).await)?;
        same(&format!("add_once of turn {n}"), &add, &want)?;
    }
    // A name alone is another id.
    let add = ok("add_once", cx.store.add_once(&key, &name.clone().into(), 1).await)?;
    same("add_once of the name alone", &add, &Once::Applied(6))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn turns_of_poisons<S: Store>(cx: Cx<S>) -> Seen {
    let (key, name) = (cx.key("turnpoison"), cx.key("step"));
    let turn = |n| Id::in_turn(name.clone(), n);
    let poison = |n| {
        let (cx, key, id) = (cx.clone(), key.clone(), turn(n));
        async move { ok("poison_once", cx.store.poison_once(&key, &id).await) }
    };
    same("poison of turn 5", &poison(5).await?, &Once::Poisoned)?;
    for (n, want) in [(5, Once::Poisoned), (6, Once::Applied(1)), (6, Once::Duplicate)] {
        let add = ok("add_once", cx.store.add_once(&key, &turn(n), 1).await)?;
        same(&format!("add_once of turn {n}"), &add, &want)?;
    }
    same("poison of the turn that counted", &poison(6).await?, &Once::Duplicate)?;
    same("poison of a turn that is over", &poison(5).await?, &Once::Poisoned)?;
    same("poison of the next turn", &poison(7).await?, &Once::Poisoned)?;
    same("get", &cx.bytes(&key).await?, &Some("1".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn turns_of_holds<S: Store>(cx: Cx<S>) -> Seen {
    let (key, name) = (cx.key("turnhold"), cx.key("step"));
    let turn = |n| Id::in_turn(name.clone(), n);
    ok("put", cx.store.put(&key, "9".into(), None).await)?;
    let take = |n, amount| {
        let (cx, key, id) = (cx.clone(), key.clone(), turn(n));
        async move { ok("take", cx.store.take(&key, amount, &id).await) }
    };
    let end = |n, end| {
        let (cx, key, id) = (cx.clone(), key.clone(), turn(n));
        async move { ok("end_hold", cx.store.end_hold(&key, &id, end).await) }
    };
    same("take", &take(1, 2).await?, &Take::Taken { left: 7 })?;
    same("take again", &take(1, 2).await?, &Take::Taken { left: 7 })?;
    same("sold", &end(1, End::Sold).await?, &Ended::Now { amount: 2 })?;
    same("the next turn takes", &take(2, 3).await?, &Take::Taken { left: 4 })?;
    same("a turn that is over takes nothing", &take(1, 2).await?, &Take::Ended { amount: 0 })?;
    let over = Ended::Before { end: End::Back, amount: 0 };
    same("and has nothing to put back", &end(1, End::Back).await?, &over)?;
    same("put back", &end(2, End::Back).await?, &Ended::Now { amount: 3 })?;
    same("bars", &end(3, End::Back).await?, &Ended::Now { amount: 0 })?;
    same("what was barred", &take(3, 1).await?, &Take::Ended { amount: 0 })?;
    same("get", &cx.bytes(&key).await?, &Some("7".into()))?;
    clean(&cx, &key).await;
    Ok(())
}

pub(super) async fn turns_left_open<S: Store>(cx: Cx<S>) -> Seen {
    let (key, name) = (cx.key("turnopen"), cx.key("step"));
    let turn = |n| Id::in_turn(name.clone(), n);
    ok("put", cx.store.put(&key, "9".into(), None).await)?;
    for n in 1..=3 {
        ok("take", cx.store.take(&key, n, &turn(n)).await)?;
    }
    ok("take", cx.store.take(&key, 1, &cx.id("user")).await)?;
    let told = all(&cx, &key).await?;
    let mut open: Vec<_> = told.into_iter().map(|h| (h.amount, h.ended)).collect();
    open.sort_by_key(|(amount, _)| *amount);
    same("holds", &open, &vec![(1, None), (1, None), (2, None), (3, None)])?;
    clean(&cx, &key).await;
    Ok(())
}
