"""What hosts are like before anything starts on them: asked (collect, talk), read (facts), judged (judge), reported."""
